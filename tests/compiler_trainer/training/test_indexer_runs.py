"""A run of a model whose indexer the loss does not train: stopped, resumed and exported, the indexer is as it was."""

from __future__ import annotations

import json

import indexers
import pytest
import torch
from commands import call
from doc_places import tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

JOB = (
    "data=text", "data.files=[text.jsonl]", "data.cache=cache", "model=hf", "model.path=deepseek", "train.seq_len=32",
    "train.global_batch_size=4", "train.steps=4", "eval.interval=null", "checkpoint.interval=2", "optim.lr=3e-3",
    "optim.weight_decay=0.1", "lr_schedule=constant", "lr_schedule.warmup_ratio=0", "lower.backend=eager",
    "run.dump_graphs=false",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder, the current one, with a small DeepSeek-V3.2 and a text."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = indexers.config_of("deepseek_v32", vocab_size=300)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained("deepseek")
    tokenizer().save("deepseek/tokenizer.json")
    (tmp_path / "deepseek/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with open("text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"{i} sea, {i * i} ships. " * (i % 5 + 1)}) + "\n" for i in range(60))
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_an_indexer_is_resumed_and_exported_as_it_was(optim, place, capsys):
    job = (*JOB, f"optim={optim}")
    assert call(*job, "run.dir=whole") == 0
    assert "stay unchanged" in capsys.readouterr().out
    assert call(*job, "train.steps=2", "run.dir=parts") == 0
    assert call(*job, "checkpoint.resume=latest", "run.dir=parts") == 0
    assert call("export", "parts", "out") == 0 and call("export", "whole", "all") == 0
    before, after, undisturbed = (load_file(f"{name}/model.safetensors") for name in ("deepseek", "out", "all"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        is_trained = ".indexer." not in name and value.is_floating_point() and "e_score_correction_bias" not in name
        assert torch.equal(after[name], undisturbed[name]) and torch.equal(after[name], value) != is_trained, name
