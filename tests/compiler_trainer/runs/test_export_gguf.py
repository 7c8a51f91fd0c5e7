"""GGUF files of runs: they compute the trainer's values in transformers, and what has none is refused before any work."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import folders
import pytest
from commands import call
from gguf import GGUFReader
from open_hub import accepting
from short_runs import options

from compiler_trainer.config import schema
from compiler_trainer.config.schema import ExpertsConfig, FolderConfig, LoraConfig, RopeScaling
from compiler_trainer.runs import check_export, plainly
from compiler_trainer.runs import export as exporting
from compiler_trainer.training import trainer

FOLDER = FolderConfig(path=str(folders.folder("llama")))
MODELS = {
    "decoder": options("x").model,
    "normed": replace(options("x").model, dim=64, ffn_dim=96, qk_norm="learned"),  # a Qwen3, with whole blocks of q8_0
    "experts": replace(options("x").model, experts=ExpertsConfig(count=4, top_k=2, width=8)),
    "folder": FOLDER,
    "lora": replace(FOLDER, lora=LoraConfig(rank=2, alpha=64.0)),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Run transformers in this process, because a separate one takes seconds to start."""
    here = lambda out, head, texts, config="": plainly.values_of(str(out), head, texts, config)  # noqa: E731
    monkeypatch.setattr(check_export, "by_itself", here)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return runs by model, each trained on first use."""
    runs = {}

    def of(kind):
        if kind not in runs:
            runs[kind] = tmp_path_factory.mktemp(kind) / "run"
            trainer.train(options(runs[kind], steps=2, model=MODELS[kind]))
        return runs[kind]
    return of


@pytest.fixture
def no_work(monkeypatch):
    """Fail if an export begins."""
    monkeypatch.setattr(exporting, "trained_model", lambda *_: pytest.fail("the export began"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "flags", "dtype"), [
    ("decoder", [], "float32"), ("decoder", ["--dtype", "float16"], "float16"), ("folder", ["--dtype", "bfloat16"], "bfloat16"),
    ("lora", ["--merge"], "float32"), ("normed", ["--dtype", "q8_0"], "q8_0"),
])
def test_a_file_has_the_trainers_log_probabilities(kind, flags, dtype, trained, tmp_path, capsys):
    file, run = tmp_path / "model.gguf", trained(kind)
    capsys.readouterr()
    assert call("export", run, file, *flags) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: run it with llama.cpp: llama-cli -m {file}; ") and " are equal: " in said
    assert list(tmp_path.iterdir()) == [file]
    assert call("check-export", run, file, "--tokens", 24) == 0
    assert " are equal: at most" in (said := capsys.readouterr().out) and f"{dtype} allows" in said


def test_a_changed_file_differs(trained, tmp_path, capsys):
    file = tmp_path / "model.gguf"
    assert call("export", trained("decoder"), file) == 0
    reader = GGUFReader(file, "r+")
    (norm,) = [tensor for tensor in reader.tensors if tensor.name == "output_norm.weight"]
    norm.data[:] *= 1.001
    reader.data.flush()
    assert call("check-export", trained("decoder"), file, "--tokens", 24) == 1
    assert " differ: at most " in capsys.readouterr().out


@pytest.mark.full
def test_a_file_that_transformers_does_not_read_is_checked_as_a_folder(trained, tmp_path, capsys):
    file = tmp_path / "model.gguf"
    assert call("export", trained("experts"), file) == 0
    assert "are equal" in (said := capsys.readouterr().out) and said.endswith("; a folder was checked, transformers does not read the file\n")
    assert {t.name: tuple(t.shape) for t in GGUFReader(file).tensors}["blk.0.ffn_gate_exps.weight"] == (16, 8, 4)
    assert call("check-export", trained("experts"), file) == 2
    assert capsys.readouterr().err == f"error: {file}: transformers reads no GGUF files of this architecture; check a folder in its place\n"


@pytest.mark.full
def test_files_of_one_model_share_a_repository(trained, tmp_path, monkeypatch, capsys):
    hub = accepting(monkeypatch)
    for dtype in ("float16", "q8_0"):
        assert call("export", trained("folder"), f"hub:me/tiny/tiny-{dtype}.gguf", "--dtype", dtype) == 0
    assert hub["me/tiny"].keys() == {".gitattributes", "README.md", "tiny-float16.gguf", "tiny-q8_0.gguf"}
    assert "llama-cli -m me/tiny/tiny-q8_0.gguf" in capsys.readouterr().out
    assert call("export", trained("folder"), "hub:me/tiny/tiny-q8_0.gguf") == 2
    assert "hub:me/tiny: has tiny-q8_0.gguf already; name a new file" in capsys.readouterr().err


# Refusals


def refused(tmp_path, capsys, model, *arguments, **changes):
    """Return the line that refuses the export of a run, which has options and no checkpoint: it is not looked for."""
    (tmp_path / "run").mkdir()
    schema.save(replace(options(tmp_path / "run"), model=model, **changes), tmp_path / "run/config.yaml")
    assert call("export", tmp_path / "run", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(("model", "out", "flags", "line"), [
    ("lora", "a.gguf", [], "a.gguf: GGUF is for whole models, and this run has adapters; add --merge"),
    ("scores", "a.gguf", [], "a.gguf: GGUF is written for causal language models alone; export a folder, not in float8"),
    ("own", "a.gguf", [], "a.gguf: GGUF is written for causal language models alone; export a folder, not in float8"),
    ("folder", "out", ["--dtype", "q8_0"], "--dtype: q8_0 is no type of folders; choose one of float32, bfloat16, float16, float8, or name a file OUT.gguf"),
    ("folder", "a.gguf", ["--dtype", "float8"], "--dtype: float8 is no type of GGUF files; choose one of float32, float16, bfloat16, q8_0, or name a folder"),
    ("lora", "out", ["--dtype", "float8"], "out: float8 is for whole models, and this run has adapters; add --merge"),
    ("own", "out", ["--dtype", "float8"], "out: float8 is written for causal language models alone; export a folder, not in float8"),
    ("gpt2", "a.gguf", [], "model: is of type gpt2, and GGUF is written for gemma2, gemma3_text, gpt_oss, llama, mistral, mixtral, phi3, qwen2, qwen3, "
                           "qwen3_moe; export a folder, and convert it with llama.cpp's convert_hf_to_gguf.py"),
    ("stretched", "a.gguf", [], "model: has rope_type=llama3 in its config, and llama.cpp computes qwen3 in another way; export a folder"),
])
def test_what_has_no_file_is_refused_before_any_work(model, out, flags, line, tmp_path, no_work, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = MODELS | {
        "scores": replace(FOLDER, head="score"), "own": {"_target_": "torch.nn.Identity"}, "gpt2": FolderConfig(path=str(folders.folder("gpt2"))),
        "stretched": replace(MODELS["normed"], rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
    }
    changes = {"loss": {}} if model == "own" else {}
    assert refused(tmp_path, capsys, models[model], out, *flags, **changes) == line


def test_a_file_that_is_there_is_refused(tmp_path, no_work, capsys):
    (tmp_path / "a.gguf").touch()
    assert refused(tmp_path, capsys, FOLDER, tmp_path / "a.gguf") == f"{tmp_path / 'a.gguf'}: exists already; name a new or an empty folder"


@pytest.mark.parametrize(("name", "extra", "arguments"), [("gguf", "gguf", ["a.gguf"]), ("compressed_tensors", "fp8", ["out", "--dtype", "float8"])])
def test_a_missing_library_is_named_with_its_extra(name, extra, arguments, tmp_path, no_work, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    assert re.fullmatch(rf"{name}: is not installed, but needed here; pip install '.*\[{extra}\]'", refused(tmp_path, capsys, FOLDER, *arguments))


def test_a_file_is_not_a_folder(tmp_path, capsys):
    (tmp_path / "a.gguf").mkdir()
    schema.save(options(tmp_path), tmp_path / "config.yaml")
    assert call("check-export", tmp_path, tmp_path / "a.gguf") == 2
    assert "a.gguf: is no folder or GGUF file; write one with" in capsys.readouterr().err
