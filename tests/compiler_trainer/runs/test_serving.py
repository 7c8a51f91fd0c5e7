"""An export is what servers read, can be made during training, and computes the trainer's values."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import doc_places
import folders
import pytest
import torch
import transformers
from commands import call
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from short_runs import metrics, options, timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiler_trainer as ct
from compiler_trainer import checkpoint
from compiler_trainer.config.schema import FolderConfig
from compiler_trainer.runs import check_export, plainly
from compiler_trainer.runs.check_export import compared
from compiler_trainer.runs.export import export
from compiler_trainer.runs.saved import options_of
from compiler_trainer.training import trainer

FOLDER = FolderConfig(path=str(folders.folder("qwen3")))  # its head is tied
MODELS = {"decoder": options("x").model, "folder": FOLDER}


@pytest.fixture
def at_once(monkeypatch):
    """Run transformers in this process, because a separate one takes seconds to start."""
    monkeypatch.setattr(check_export, "by_itself", lambda out, head, texts: plainly.values_of(str(out), head, texts))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return runs by model, each trained on first use."""
    found = {}

    def of(kind):
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp(kind) / "run"
            trainer.train(options(found[kind], steps=2, model=MODELS[kind]))
        return found[kind]
    return of


def stored(folder):
    """Return the tensors of a folder, name -> (dtype, shape), and the metadata of its files."""
    tensors, said = {}, []
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            said.append(file.metadata())
            tensors |= {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}
    return tensors, said


# Layout


@pytest.mark.full
@pytest.mark.parametrize("most", ["1GB", "20KB"])
def test_an_export_is_laid_out_as_transformers_saves_the_same_model(most, trained, tmp_path, monkeypatch):
    saving = partialmethod(transformers.PreTrainedModel.save_pretrained, max_shard_size=most)
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", saving)
    assert call("export", trained("folder"), tmp_path / "ours", "--dtype", "bfloat16") == 0
    folders.loaded(folders.folder("qwen3"), torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert stored(ours) == stored(theirs)
    tensors, said = stored(ours)
    assert set(said[0].items()) >= {("format", "pt")} and {dtype for dtype, _ in tensors.values()} == {"BF16"}
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    if most == "20KB":
        files = json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"]
        assert files.keys() == tensors.keys() and set(files.values()) == {path.name for path in ours.glob("*.safetensors")} and len(said) > 1
    config = json.loads((ours / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"] and config["dtype"] == "bfloat16"


@pytest.mark.full
def test_the_export_of_a_decoder_says_where_it_ends_and_how_long_it_is(trained, tmp_path):
    assert call("export", trained("decoder"), tmp_path / "out") == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.max_position_embeddings == 16 and model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 256


@pytest.mark.full
def test_what_lies_beside_a_tokenizer_comes_along(tmp_path):
    doc_places.tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(doc_places.TEMPLATE)
    cfg = options(tmp_path / "run", steps=2)
    cfg = replace(cfg, data=replace(cfg.data, tokenizer=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"), model=replace(cfg.model, vocab_size=260))
    trainer.train(cfg)
    assert call("export", tmp_path / "run", tmp_path / "out") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|endoftext|>"


class Exports(ct.Callback):
    """A callback that exports each checkpoint of its run and loads the export."""

    def __init__(self):
        self.made = {}

    def on_checkpoint(self, run, path):
        out = run.folder.with_name(path.name)
        assert call("export", run.folder, out, "--checkpoint", path) == 0
        self.made[path.name] = {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(out).named_parameters()}
        wanted = checkpoint.read_model(path)
        assert all(torch.equal(value, wanted[name]) for name, value in self.made[path.name].items())


@pytest.mark.full
def test_exporting_while_a_run_trains_changes_nothing_in_it(tmp_path):
    exports = Exports()
    trainer.train(options(tmp_path / "run", model=FOLDER), callbacks=[exports])
    first, *_, last = exports.made.values()
    assert [*exports.made] == ["step_00000002", "step_00000004", "step_00000006"]
    assert not torch.equal(first["model.embed_tokens.weight"], last["model.embed_tokens.weight"])
    trainer.train(options(tmp_path / "alone", model=FOLDER))
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(tmp_path / "alone"))


def test_an_export_is_there_once_it_is_whole(trained, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("disk is full")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fails)
    with pytest.raises(OSError, match="disk is full"):
        export(options_of(trained("folder"), []), tmp_path / "out", None, False)
    assert list(tmp_path.iterdir()) == []


# Numbers


@pytest.mark.full
@pytest.mark.parametrize("kind", ["decoder", "folder"])
def test_an_export_has_the_trainers_log_probabilities_and_one_that_was_changed_has_not(kind, trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert call("export", trained(kind), out) == 0
    if kind == "decoder":  # the other one without a separate process, which takes seconds to start
        monkeypatch.setattr(check_export, "by_itself", lambda out, head, texts: plainly.values_of(str(out), head, texts))
    capsys.readouterr()
    assert call("check-export", trained(kind), out, "--tokens", 24) == 0
    said = capsys.readouterr().out
    (tokens, apart) = re.match(rf"{out}: log-probabilities of (\d+) tokens of \d rows are equal: at most (\S+) apart", said).groups()
    assert int(tokens) >= 12 and float(apart) < 1e-5 and "float32 allows" in said
    monkeypatch.setattr(check_export, "by_itself", lambda out, head, texts: plainly.values_of(str(out), head, texts))
    values = load_file(out / "model.safetensors")
    values["model.norm.weight"] = values["model.norm.weight"] * 1.001
    save_file(values, out / "model.safetensors", {"format": "pt"})
    assert call("check-export", trained(kind), out, "--tokens", 24) == 1
    assert " differ: at most " in capsys.readouterr().out


@pytest.mark.full
def test_averages_are_compared_with_averages_and_told_from_weights(tmp_path, capsys, at_once):
    cfg = options(tmp_path / "run", steps=4)
    trainer.train(replace(cfg, train=replace(cfg.train, ema=0.5)))
    codes = {}
    for name, flags in {"plain": [], "averaged": ["--ema"]}.items():
        assert call("export", tmp_path / "run", tmp_path / name, "--no-check", *flags) == 0
        for compared_with in ([], ["--ema"]):
            codes[name, *compared_with] = call("check-export", tmp_path / "run", tmp_path / name, "--tokens", 24, *compared_with)
    assert codes == {("plain",): 0, ("plain", "--ema"): 1, ("averaged",): 1, ("averaged", "--ema"): 0}
    said = [line for line in capsys.readouterr().out.splitlines() if "log-probabilities" in line]
    assert [" are equal: " in line for line in said] == [True, False, False, True]


def test_averages_of_a_run_without_any_are_refused(trained, tmp_path, capsys, at_once):
    assert call("export", trained("decoder"), tmp_path / "out") == 0
    assert call("check-export", trained("decoder"), tmp_path / "out", "--ema") == 2
    assert "error: --ema: " in capsys.readouterr().err


@pytest.mark.full
def test_transformers_generates_from_an_export_what_the_run_generates(trained, tmp_path, capsys):
    assert call("export", trained("folder"), tmp_path / "out") == 0
    capsys.readouterr()
    assert call("generate", trained("folder"), "--prompt", "ab", "--tokens", 8, "--temperature", 0) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = model.generate(**tokenizer("ab", return_tensors="pt"), max_new_tokens=8, do_sample=False)[0]
    assert bytes(i for i in ids.tolist() if i < 256).decode(errors="replace") == capsys.readouterr().out.removesuffix("\n")


@pytest.mark.full
def test_what_is_no_export_is_refused(trained, tmp_path, capsys):
    assert call("check-export", trained("folder"), tmp_path / "none") == 2
    assert f"error: {tmp_path / 'none'}: is no folder or GGUF file; write one" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert call("check-export", trained("folder"), tmp_path / "empty") == 2
    assert f"error: {tmp_path / 'empty'}: transformers does not compute with it: " in capsys.readouterr().err


@pytest.mark.parametrize(("apart", "value", "dtype", "is_same"), [
    (7e-6, -0.5, "float32", True), (9e-6, -0.5, "float32", False), (6e-5, -9.0, "float32", True), (8e-5, -9.0, "float32", False),
    (0.4, -0.5, "bfloat16", True), (0.6, -0.5, "bfloat16", False), (0.05, -0.5, "float16", True), (torch.nan, -0.5, "bfloat16", False),
])
def test_how_far_apart_they_may_be_follows_from_the_dtype(apart, value, dtype, is_same):
    ours = torch.tensor([-1.0, value], dtype=torch.float64)
    found, said = compared(ours, ours + torch.tensor([0.0, apart], dtype=torch.float64), dtype, 3, "log-probabilities")
    assert found == is_same and f"{dtype} allows" in said and "2 tokens of 3 rows" in said


@pytest.mark.full
def test_other_text_is_compared_too(trained, tmp_path, capsys, at_once):
    (tmp_path / "a.txt").write_text("abcdefgh" * 9)
    assert call("export", trained("folder"), tmp_path / "out") == 0
    assert call("check-export", trained("folder"), tmp_path / "out", "data=text", f"data.files=[{tmp_path / 'a.txt'}]") == 0
    assert "tokens of 5 rows are equal" in capsys.readouterr().out
