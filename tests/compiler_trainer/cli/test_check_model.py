"""`check-model` compares a user's model with eager PyTorch, on the mesh and with the options given."""

from __future__ import annotations

import re

import folders
import pytest
import torch
from commands import call
from torch import nn

SMALL = ("check-model", "strangers.Reader", "model.width=6", "model.vocabulary=11", "model.frozen=true")


class Counting(nn.Module):
    """A module that scales by the number of its calls, which a compiled step keeps constant."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(7, 4), nn.Linear(4, 7), 1.0

    def forward(self, tokens):
        self.calls += 0.01
        return self.head(self.embed(tokens)) * self.calls


class CountingDropout(Counting):
    """The same after dropout, with which one compiled step has the error of another."""

    def __init__(self):
        super().__init__()
        self.dropout = 0.1

    def forward(self, tokens):
        return nn.functional.dropout(super().forward(tokens), self.dropout, self.training)


class Drawing(nn.Module):
    """A module with dropout and noise, a table of positions before that of tokens, and a head of two layers."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.places, self.embed, self.noise = nn.Embedding(512, 4), nn.Embedding(7, 4), noise
        self.drop, self.head = nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7))

    def forward(self, tokens, positions):
        x = self.drop(self.embed(tokens) + self.places(positions))
        return self.head(x + self.noise * torch.randn_like(x) if self.noise else x)


class OfOneDevice(nn.Module):
    """A module that branches on a value."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x if x.sum() > 0 else -x)


def half_precision_only(**_):
    """Return a module that does not take fp64."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)

        def forward(self, tokens):
            return self.embed(tokens) @ torch.ones(4, 7, dtype=torch.float16)

    return Half()


@pytest.mark.parametrize("options", [("mesh.tp=2", "train.microbatches=3"), ("mesh.dp_shard=2", "loss._target_=strangers.scaled", "loss.by=2.0", "optim=sgd")])
def test_a_right_model_prints_its_row(options, capsys):
    assert call(*SMALL, *options) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"model=custom model._target_=strangers.Reader model.width=6 model.vocabulary=11 model.frozen=true {' '.join(options)}: right, off by ")
    assert shown.endswith(" s)\n")


@pytest.mark.full
def test_a_decoder_with_experts_is_compared_by_options_alone(capsys):
    small = ("model.dim=8", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=8", "model.n_layers=2")
    experts = ("model.experts.count=4", "model.experts.top_k=2", "model.experts.width=6", "model.experts.balance_loss=0")
    assert call("check-model", "model=moe_debug", *small, *experts, "mesh.dp_shard=2", "mesh.ep=2") == 0
    assert "right, off by " in capsys.readouterr().out


@pytest.mark.full
def test_further_tokens_of_documents_are_compared_with_microbatches(capsys):
    small = ("model.dim=8", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=8", "model.n_layers=1", "model.mtp.layers=1")
    assert call("check-model", "model=llama_debug", *small, "train.microbatches=3", "mesh.tp=2") == 0
    assert "right, off by " in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("mesh", [("mesh.dp_shard=2", "mesh.ep=2"), ("mesh.dp_shard=2", "mesh.tp=2")], ids="_".join)
def test_experts_of_transformers_are_compared_and_adapted_by_lora_as_other_layers(mesh, capsys):
    """peft wraps such a layer twice, once for each of its weights."""
    arguments = ("check-model", "model=hf", f"model.path={folders.folder('mixtral')}")
    assert call(*arguments, "+model.lora.rank=4", "model.lora.targets=[all-linear]", *mesh) == 0
    assert "right, off by " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("Counting", "mesh.tp=2"), ("CountingDropout",)])
def test_a_wrong_model_names_what_is_off(arguments, capsys):
    assert call("check-model", f"test_check_model.{arguments[0]}", *arguments[1:]) == 1
    assert ": wrong, off by " in capsys.readouterr().out


@pytest.mark.parametrize(("options", "remark"), [((), " ("), (("mesh.tp=2",), " ("), (("optim=muon",), " ("), (
    ("mesh.tp=2", "model.noise=0.1"), "; compared with a compiled step on one rank, because it draws random numbers (")])
def test_a_model_that_draws_is_compared_without_dropout_and_between_meshes(options, remark, capsys):
    assert call("check-model", "test_check_model.Drawing", *options) == 0
    assert re.search(rf"right, off by \S+ at step \d: [\w.]+{re.escape(remark)}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("test_check_model.OfOneDevice", "mesh.tp=2"), "error: model"),
        (("strangers.Reader", "model.width=6", "mesh.dp_shard=-1"), "error: mesh.dp_shard: -1 takes the remaining ranks, and nothing says how many there are; set mesh.dp_shard\n"),
        (("strangers.Reader", "model.width=6", "optim=adamw8bit"), "error: optim: adamw8bit rounds its moments, which eager PyTorch does not do; use optim=adamw\n"),
        (("test_check_model.half_precision_only",), "error: model: eager PyTorch cannot run it in float64 on the CPU (RuntimeError: "),
        (("strangers.Reader", "model.width=6", "passes.cast.param_dtype=bfloat16"), "error: passes.cast.param_dtype: is bfloat16, whose rounding would hide an error; set it to null\n"),
        (("strangers.Reader", "model.width=6", "optim.state=bfloat16"), "error: optim.state: is bfloat16, whose rounding would hide an error; set it to null\n"),
        (("test_check_model.Drawing", "model.noise=0.1"), "error: model: draws random numbers other than dropout, so only meshes can be compared; state one, as mesh.dp_shard=2\n"),
        (("test_check_model.Nobody",), "error: model._target_: "),
    ],
)
@pytest.mark.sample(2)
def test_what_cannot_be_compared_is_one_line(arguments, message, capsys):
    assert call("check-model", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(message) and shown.err.count("\n") == 1, shown.err
