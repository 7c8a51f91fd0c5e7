"""Verbs on a run: resuming, evaluating, sampling, exporting, each through the command."""

from __future__ import annotations

import json
import math
import re
import shutil
from functools import partial

import doc_places
import folders
import numpy as np
import peft
import pytest
import torch
import transformers
from commands import call
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from compiler_trainer import checkpoint
from compiler_trainer.cli.table import VERBS
from compiler_trainer.config import schema
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.models import merge, sampling
from compiler_trainer.models.sampling import Sampling, chances
from compiler_trainer.models.subject import subject
from compiler_trainer.runs.saved import trained_model
from compiler_trainer.training import loggers

FEW = ["lower.backend=eager", "data=synthetic", "data.documents=40", "train.steps=2", "train.seq_len=16",
       "train.global_batch_size=3", "eval.interval=null", "run.dump_graphs=false"]
SMALL = ["model.dim=24", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=40", "model.n_layers=2"]
KINDS = {
    "decoder": SMALL,
    "tied": [*SMALL, "model.tied=true", "model.qk_norm=learned", "train.dtype=bfloat16"],
    "folder": ["model=hf", f"model.path={folders.folder('qwen3')}", "data.tokenizer=bytes"],
    "lora": ["model=hf", f"model.path={folders.folder('llama')}", "data.tokenizer=bytes", "model.lora.rank=2",
             "model.lora.targets=[q_proj,v_proj]", "checkpoint.frozen=false"],
    **{f"lora on {name}": ["model=hf", f"model.path={folders.folder('qwen3')}", "data.tokenizer=bytes", "model.lora.rank=2",
                           f"model.lora.targets=[{name}]", "optim.lr=0.1"] for name in ("lm_head", "embed_tokens")},
    "own": ["model=custom", "model._target_=strangers.Reader", "model.width=6", "loss._target_=strangers.scaled",
            "loss.by=2.0"],
}


@pytest.fixture
def run(capsys):
    """Run the command; return its output, or its error after exit code 2."""
    def act(*arguments):
        capsys.readouterr()
        code = call(*arguments)
        assert code in (0, 2)
        shown, said = capsys.readouterr()
        return said if code else shown
    return act


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return run folders by kind, each trained for two steps on first use."""
    found = {}

    def of(kind):
        if kind not in found:
            path = tmp_path_factory.mktemp(kind) / "run"
            assert call(*FEW, *KINDS[kind], f"run.dir={path}") == 0
            found[kind] = path
        return found[kind]
    return of


def records(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def values(said):
    """Return the results of `eval` by name."""
    return {name: float(value) for name, value in (part.split(" ") for part in said.partition(", tokens")[0].split(", "))}


def weights(path):
    return checkpoint.read_model(checkpoint.complete(path / "checkpoints")[-1])


# Resuming


@pytest.mark.parametrize("kind", ["decoder", "lora", "own"])
@pytest.mark.sample(1)
def test_resume_goes_on_as_if_never_stopped(kind, run, trained, tmp_path):
    run(*FEW, *KINDS[kind], f"run.dir={tmp_path / 'whole'}", "train.steps=4", "checkpoint.interval=2")
    part = tmp_path / "part"
    run(*FEW, *KINDS[kind], f"run.dir={part}", "train.steps=4", "checkpoint.interval=2", "checkpoint.keep=5")
    for file in (part / "checkpoints/step_00000004").iterdir():
        file.unlink()
    run("resume", part)
    assert [r["step"] for r in records(part)] == [1, 2, 3, 4]
    assert [r["loss"] for r in records(part)] == [r["loss"] for r in records(tmp_path / "whole")]
    there, here = weights(tmp_path / "whole"), weights(part)
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in there)


def test_resume_takes_options_anew(run, trained, tmp_path):
    folder = tmp_path / "run"
    run(*FEW, *KINDS["decoder"], f"run.dir={folder}")
    run("resume", folder, "train.steps=3", "optim.lr=0", "lr_schedule=constant")
    assert [r["lr"] for r in records(folder)][2] == 0
    assert schema.load(folder / "config.yaml").lr_schedule.name == "constant"


# Frozen weights


def test_frozen_weights_need_not_be_stored(trained):
    stored = weights(trained("lora"))
    assert stored and all(".lora_" in name for name in stored if not name.endswith("inv_freq"))


# Choice of a checkpoint


@pytest.mark.full
def test_every_verb_reads_the_best_checkpoint_or_one_that_is_named(run, tmp_path):
    folder = tmp_path / "run"
    how = ["train.steps=3", "checkpoint.interval=1", "eval.interval=1", "checkpoint.keep=3", "optim.lr=0.5", "optim=sgd"]
    run(*FEW, *SMALL, *how, f"run.dir={folder}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["eval_loss"] for record in records}
    least = min(losses, key=losses.get)
    path = folder / f"checkpoints/step_{least:08}"
    assert run("check", folder, "--checkpoint", "best").startswith(f"{path}: whole") and run("check", folder).count("\n") == 3
    said = run("eval", folder, "--checkpoint", "best")
    assert values(said)["loss"] == pytest.approx(losses[least], rel=1e-5) and said == run("eval", folder, "--checkpoint", path)
    other = next(step for step in losses if losses[step] != losses[least])
    assert said != run("eval", folder, "--checkpoint", folder / f"checkpoints/step_{other:08}")
    for name, which in (("a", "best"), ("b", path)):
        run("export", folder, tmp_path / name, "--checkpoint", which)
    one, two = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in "ab")
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert run("generate", folder, "--checkpoint", "best", "--tokens", "3") == run("generate", folder, "--checkpoint", path, "--tokens", "3")


@pytest.mark.full
def test_without_held_out_losses_there_is_no_best_checkpoint(run, trained):
    assert "no checkpoint in" in run("export", trained("decoder"), "nowhere", "--checkpoint", "best")


# Checking


def test_check_reads_every_byte_and_says_a_line_a_checkpoint(run, trained, tmp_path):
    folder = shutil.copytree(trained("decoder"), tmp_path / "run")
    path = folder / "checkpoints/step_00000002"
    assert run("check", folder) == f"{path}: whole, 64 tensors in 1 file, 0.3 MiB\n"
    file = path / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert call("check", folder) == 2
    file.write_bytes(file.read_bytes()[:-1])
    passed_over, refused = run("export", folder, tmp_path / "out").splitlines()
    assert passed_over.startswith(f"{path} is damaged and passed over: {file}: has ")
    assert refused.startswith(f"error: {folder / 'checkpoints'}: holds 1 checkpoints, all of them damaged")


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_check_names_checkpoints_that_were_set_aside(inside, run, trained, tmp_path, capsys):
    folder = shutil.copytree(trained("decoder"), tmp_path / "run")
    path = folder / "checkpoints/step_00000002"
    checkpoint.set_aside(shutil.copytree(path, path.with_name("step_00000001")), "damaged")
    path.with_name("step_00000003.tmp").mkdir()
    named, whole = run("check", folder / inside).splitlines()
    assert named == f"{path.with_name('step_00000001.damaged')}: set aside as damaged, no command reads it"
    assert whole.startswith(f"{path}: whole, ")
    checkpoint.set_aside(path, "left")
    assert call("check", folder / inside) == 2 and f"{path}.left: set aside as left, " in capsys.readouterr().out


# Evaluating


@pytest.mark.parametrize("kind", ["decoder", "folder"])
@pytest.mark.sample(1)
def test_eval_is_the_mean_loss_of_every_held_out_token(kind, run, trained):
    path = trained(kind)
    cfg = schema.load(path / "config.yaml")
    found, model = trained_model(cfg)
    rows = build_datasets(cfg.data, 16, 3).eval.rows
    batch = {name: torch.from_numpy(value.copy()) for name, value in rows.batch(np.arange(len(rows))).items()}
    with torch.no_grad():
        wanted = float(found.loss(model, batch))
    said = run("eval", path, "eval.batches=null")
    labels = int((batch["labels"] >= 0).sum())
    assert values(said) == pytest.approx({"loss": wanted, "perplexity": math.exp(wanted)}, rel=1e-4)
    assert said.endswith(f", tokens {labels:,} in all {len(rows):,} rows\n")


@pytest.mark.full
def test_a_loss_with_a_term_for_routers_has_no_perplexity(run, tmp_path):
    shutil.copytree(folders.folder("mixtral"), tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"output_router_logits": True}))
    assert call(*FEW, "model=hf", f"model.path={tmp_path}/model", "data.tokenizer=bytes", f"run.dir={tmp_path}/run") == 0
    said = run("eval", tmp_path / "run")
    assert said.startswith("loss ") and "perplexity" not in said


def test_eval_takes_all_of_other_text(run, trained, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 9)
    said = run("eval", trained("decoder"), "data=text", f"data.files=[{tmp_path / 'a.txt'}]")
    assert said.endswith("tokens 72 in all 5 rows\n")


def test_eval_says_how_much_it_read_and_how_far_it_is(trained, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "WORKING_EVERY_S", 0.0)
    monkeypatch.setattr(loggers, "LINES", math.inf)
    capsys.readouterr()
    assert call("eval", trained("decoder"), "eval.batches=2") == 0
    shown, said = capsys.readouterr()
    assert re.search(r", tokens 96 in 2 x 3 rows; eval.batches=null takes all \d+ rows\n$", shown)
    assert said.endswith(" s: batch 2 of 2\n")


def test_a_run_that_held_nothing_out_has_no_loss_of_it(run, trained):
    said = run("eval", trained("decoder"), "data.eval_fraction=0")
    assert said.startswith("error: data.eval_fraction: is 0, so there is no validation data; name a text")


# Sampling


def test_generate_goes_on_with_the_prompt_and_the_seed_decides(run, trained):
    texts = [run("generate", trained("decoder"), "--prompt", "def f", "--tokens", 12, "--seed", seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("def f")


@pytest.mark.parametrize("kind", ["folder", "own", "lora"])
@pytest.mark.sample(1)
def test_the_likeliest_tokens_are_those_of_the_model(kind, run, trained):
    path = trained(kind)
    cfg = schema.load(path / "config.yaml")
    found, model = trained_model(cfg)
    ids = list(b"ab")
    for _ in range(5):
        batch = {"tokens": torch.tensor([ids]), "positions": torch.arange(len(ids))[None]}
        ids.append(int(found.logits(model, batch)[0, -1].argmax()))
    said = run("generate", path, "--prompt", "ab", "--tokens", 5, "--temperature", 0)
    assert said.removesuffix("\n") == "ab" + bytes(i for i in ids[2:] if i < 256).decode(errors="replace")


def test_transformers_draws_from_its_cache_what_it_is_told_to(run, trained, monkeypatch):
    path = trained("folder")  # before its calls are recorded
    seen, forward = [], transformers.Qwen3ForCausalLM.forward

    def watched(self, input_ids=None, **given):
        seen.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **given)

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "forward", watched)
    say = partial(run, "generate", path, "--prompt", "ab", "--tokens", 6)
    likeliest = say("--temperature", 0)
    assert seen == [2, 1, 1, 1, 1, 1]
    assert likeliest == say("--top-k", 1) == say("--top-p", 1e-6) != say("--temperature", 9, "--seed", 1)
    before = torch.random.get_rng_state()
    assert say("--seed", 1) == say("--seed", 1) and torch.equal(before, torch.random.get_rng_state())


def test_a_model_of_transformers_ends_at_its_last_position(run, trained):
    said = run("generate", trained("folder"), "--prompt", 60 * "a", "--temperature", 9, "--top-p", 0.99)
    assert said.startswith(60 * "a") and len(said.encode("latin", "replace")) <= 60 + 4 + 1
    refused = run("generate", trained("folder"), "--prompt", 64 * "a")
    assert refused == "error: prompt: has 64 tokens, but the model has 64 positions (max_position_embeddings); shorten it\n"


def test_a_decoder_without_a_form_is_sampled_without_a_cache_and_that_is_said(trained, capsys, tmp_path):
    path = tmp_path / "run"
    assert call(*FEW, *SMALL, "model.nope_every=2", f"run.dir={path}") == 0
    capsys.readouterr()
    assert call("generate", path, "--prompt", "ab", "--tokens", 20) == 0  # beyond train.seq_len too
    shown, said = capsys.readouterr()
    assert shown.startswith("ab") and said.startswith("without a KV cache, each token from the whole text: model.nope_every: has no equivalent")
    assert call("generate", trained("decoder"), "--prompt", 15 * "a") == 0
    assert capsys.readouterr().err == "at most 1 tokens: the model has 16 positions (train.seq_len)\n"
    assert call("generate", trained("decoder"), "--prompt", "ab", "--tokens", 14) == 0
    assert capsys.readouterr().err == ""
    assert call("generate", trained("decoder"), "--prompt", 16 * "a") == 2
    assert capsys.readouterr().err == "error: prompt: has 16 tokens, but the model has 16 positions (train.seq_len); shorten it\n"


@pytest.mark.parametrize(("how", "kept"), [
    ({}, [0, 1, 2, 3]), ({"top_k": 2}, [1, 3]), ({"top_p": 0.5}, [3]), ({"top_p": 0.51}, [1, 3]), ({"top_p": 0.9}, [1, 2, 3]),
    ({"top_k": 2, "top_p": 0.6}, [3]), ({"temperature": 0.0}, [3]), ({"temperature": 1.6, "top_p": 0.5}, [1, 3]),
])
def test_of_which_tokens_one_is_drawn(how, kept):
    likely = torch.tensor([0.0625, 0.25, 0.1875, 0.5], dtype=torch.float64)
    sampling = Sampling(**{"tokens": 1, "temperature": 1.0} | how)
    assert chances(likely.log(), sampling).nonzero().flatten().tolist() == kept
    processors = LogitsProcessorList()
    if sampling.temperature:
        processors += [TemperatureLogitsWarper(sampling.temperature)]
        processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        theirs = processors(None, likely.log()[None])[0].softmax(0)
        ours = chances(likely.log(), sampling)
        torch.testing.assert_close(ours / ours.sum(), theirs)


def test_an_answer_ends_where_the_folder_says(run, trained, monkeypatch, tmp_path):
    assert ends_of_answers(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7, "time_step_limit": [0.0, Infinity]}')
    assert ends_of_answers(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert ends_of_answers(tmp_path) == (2, 9)
    for nothing in ("[]", "null", "{}"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {nothing}}}')
        assert ends_of_answers(tmp_path) == (7,)
    (tmp_path / "config.json").write_text("[7]")
    with pytest.raises(UserError, match="config.json: is not a JSON object"):
        ends_of_answers(tmp_path)
    monkeypatch.setattr(sampling, "ends_of_answers", lambda folder: tuple(range(257)))
    assert run("generate", trained("folder"), "--prompt", "ab") == "ab\n"


@pytest.fixture
def chatting(trained, tmp_path):
    """Return a run whose tokenizer has a chat template, and that tokenizer."""
    folder = shutil.copytree(trained("folder"), tmp_path / "chats")
    places = doc_places.tokenizer()
    places.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": doc_places.TEMPLATE, "eos_token": "<|end|>"}))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("tokenizer: bytes", f"tokenizer: {tmp_path / 'tokenizer.json'}"))
    return folder, places


def test_chat_is_one_turn_through_the_template_and_the_answer_alone_is_printed(run, chatting):
    folder, tokenizer = chatting
    found, model = trained_model(schema.load(folder / "config.yaml"))
    ids = tokenizer.encode("<|user|>hi<|end|><|assistant|>").ids
    answer = []
    for _ in range(5):
        tokens = torch.tensor([[*ids, *answer]])
        answer.append(int(found.logits(model, {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None]})[0, -1].argmax()))
    said = run("generate", folder, "--chat", "--prompt", "hi", "--tokens", 5, "--temperature", 0)
    assert said == tokenizer.decode(answer) + "\n"


def test_an_answer_in_a_chat_ends_at_its_end_token(run, chatting, monkeypatch):
    folder, tokenizer = chatting
    monkeypatch.setattr(sampling, "generated", lambda *how, **inputs: torch.tensor([tokenizer.encode("yes<|end|>no").ids]))
    assert run("generate", folder, "--chat", "--prompt", "hi") == "yes\n"
    assert run("generate", folder, "--prompt", "hi") == "hiyes\n"  # it is the tokenizer's eos_token


def test_without_a_chat_template_there_is_no_chat(run, trained):
    said = run("generate", trained("decoder"), "--chat", "--prompt", "hi")
    assert said == "error: data.tokenizer: bytes has no chat template; conversations need one in the tokenizer_config.json or chat_template.jinja next to the tokenizer.json\n"


# Exporting


@pytest.mark.parametrize(("kind", "made"), [("decoder", "LlamaForCausalLM"), ("tied", "Qwen3ForCausalLM"), ("folder", "Qwen3ForCausalLM")])
@pytest.mark.sample(1)
def test_transformers_loads_what_is_exported_and_it_comes_back_to_the_bit(kind, made, run, trained, tmp_path):
    path, out = trained(kind), tmp_path / "out"
    assert "AutoModelForCausalLM.from_pretrained" in run("export", path, out)
    cfg = schema.load(path / "config.yaml")
    found, ours = trained_model(cfg)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, cfg.train.dtype)).eval()
    assert type(theirs).__name__ == made
    tokens = torch.randint(0, 257, (2, 11))
    positions = torch.arange(11).expand(2, 11)
    with torch.no_grad():
        wanted = found.logits(ours, {"tokens": tokens, "positions": positions})
        got = theirs(tokens).logits
    close = {"atol": 1e-5, "rtol": 1e-5} if cfg.train.dtype == "float32" else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(got, wanted, **close)
    assert AutoTokenizer.from_pretrained(out).encode("a\n\xe9", add_special_tokens=False) == [97, 10, 0xC3, 0xA9]
    again = subject(schema.build(schema.Config, {"model": {"path": str(out)}, "train": {"dtype": cfg.train.dtype}}))
    back = {name: value[()] for name, value in again.initial()}
    assert all(torch.equal(back[name], value) for name, value in theirs.named_parameters())


@pytest.mark.full
def test_terms_of_lora_are_exported_alone_or_merged(run, trained, tmp_path):
    path = trained("lora")
    run("export", path, tmp_path / "terms")
    run("export", path, tmp_path / "merged", "--merge")
    base = folders.loaded(folders.folder("llama"), torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "terms").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    plain = folders.loaded(folders.folder("llama"), torch.float32).eval()
    tokens = torch.randint(0, 257, (2, 11))
    with torch.no_grad():
        one, other, before = adapted(input_ids=tokens).logits, merged(tokens).logits, plain(tokens).logits
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert (one - before).abs().max() > 1e-4
    assert {p.name for p in (tmp_path / "terms").glob("*.safetensors")} == {"adapter_model.safetensors"}


@pytest.mark.full
@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_lora_on_one_of_two_tied_layers_is_merged_into_it_alone(layer, run, trained, tmp_path):
    """Merged into the shared tensor, logits were off by 3.8 to 5.7."""
    path, out = trained(f"lora on {layer}"), tmp_path / "merged"
    assert "are equal" in run("export", path, out, "--merge") and "are equal" in run("export", path, tmp_path / "terms")
    found, ours = trained_model(schema.load(path / "config.yaml"))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = torch.randint(0, 257, (2, 11))
    with torch.no_grad():
        wanted = found.logits(ours, {"tokens": tokens, "positions": torch.arange(11).expand(2, 11)})
        torch.testing.assert_close(theirs(tokens).logits, wanted, atol=1e-4, rtol=1e-4)
    assert not theirs.config.tie_word_embeddings and not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)


@pytest.mark.full
def test_an_export_that_computes_something_else_is_not_written(run, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "untie_adapted", lambda module: None)
    path, out = trained("lora on lm_head"), tmp_path / "merged"
    assert call("export", path, out, "--merge") == 1 and not out.exists()
    assert call("export", path, out, "--merge", "--no-check") == 0 and out.exists()


def test_a_module_of_ones_own_is_exported_by_its_names(run, trained, tmp_path):
    run("export", trained("own"), tmp_path / "out", "--dtype", "bfloat16")
    found = load_file(tmp_path / "out/model.safetensors")
    there = weights(trained("own"))
    buffer = there.pop("decays")  # not rounded
    assert torch.equal(found["decays"], buffer) and all(torch.equal(found[name], value.bfloat16()) for name, value in there.items())
    assert torch.equal(found["head.weight"], found["embed.weight"])


# Refusals


@pytest.mark.parametrize(("arguments", "says"), [
    (["resume", "/nowhere"], "error: /nowhere: is no run folder: it has no config.yaml\n"),
    (["resume", "no\nwhere"], "error: no where: is no run folder: it has no config.yaml\n"),
    (["eval", "RUN", "optim.lrr=1"], "error: optim.lrr: no such option; did you mean 'lr'?\n"),
    (["eval", "RUN", "optimm.lr=1"], "error: optimm.lr: no such option; the learning rate is optim.lr\n"),
    (["resume", "RUN", "optim.lr=1,2"], "error: optim.lr=1,2: is only for a new run; an override here sets one option\n"),
    (["resume", "RUN", "lr_schedule=no"], "error: lr_schedule: 'no' is not one of constant, cosine, custom, linear, wsd; a schedule of your own is lr_schedule=custom lr_schedule._target_=package.function\n"),
    (["export", "RUN", "RUN"], "error: RUN: exists already; name a new or an empty folder\n"),
    (["export", "RUN", "OUT", "--merge"], "error: --merge: needs a model with model.lora; this one has nothing to merge\n"),
    (["generate", "RUN", "--tokens", "0"], "error: generate: --tokens and --top-k must be at least 1, --temperature 0 or more\n"),
    (["generate", "RUN", "--top-p", "0"], "error: generate: --top-p is 0; it must be above 0, at most 1\n"),
])
def test_bad_input_is_refused_in_a_line(arguments, says, run, trained, tmp_path):
    names = {"RUN": str(trained("decoder")), "OUT": str(tmp_path / "out")}
    assert run(*(names.get(a, a) for a in arguments)).splitlines()[-1] == says.replace("RUN", names["RUN"]).strip()


def test_to_resume_a_run_that_has_all_its_steps_is_no_error(run, trained):
    where = trained("decoder")
    said = run("resume", where).splitlines()[-1]
    assert said == f"{where} has all 2 steps (train.steps), as of {where}/checkpoints/step_00000002; nothing to do"


def test_a_decoder_that_transformers_does_not_have_is_not_exported(run, tmp_path):
    run(*FEW, *SMALL, "model.qk_norm=plain", f"run.dir={tmp_path / 'run'}")
    assert run("export", tmp_path / "run", tmp_path / "out").startswith("error: model.qk_norm: has no equivalent in")
    assert not (tmp_path / "out").exists()


def test_version_and_help_are_ours(run):
    assert run("--version").startswith("compiler-trainer 0.1.0, torch 2.")
    assert all(verb in run("--help") for verb in VERBS)
