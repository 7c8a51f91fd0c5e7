"""A run's export in float8 computes the trainer's values in transformers, up to float8's rounding."""

from __future__ import annotations

import json

import pytest
from commands import call
from safetensors.torch import load_file, save_file
from short_runs import options

from compiler_trainer.runs import check_export, plainly
from compiler_trainer.training import trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a short run of a decoder."""
    folder = tmp_path_factory.mktemp("float8") / "run"
    trainer.train(options(folder, steps=2))
    return folder


@pytest.mark.full
def test_an_export_in_float8_is_checked_and_one_with_other_scales_differs(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check_export, "by_itself", lambda out, head, texts: plainly.values_of(str(out), head, texts))
    out = tmp_path / "out"
    capsys.readouterr()
    assert call("export", run, out, "--dtype", "float8") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: serve it with vLLM: vllm serve {out}; log-probabilities of 15 tokens") and "are equal" in said and "float8 allows" in said
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"
    assert (out / "tokenizer.json").is_file()
    assert call("check-export", run, out, "--tokens", 24) == 0
    assert "float8 allows" in capsys.readouterr().out
    tensors = load_file(out / "model.safetensors")
    tensors |= {name: value * 100 for name, value in tensors.items() if name.endswith("weight_scale")}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert call("check-export", run, out, "--tokens", 24) == 1
    assert " differ: " in capsys.readouterr().out
