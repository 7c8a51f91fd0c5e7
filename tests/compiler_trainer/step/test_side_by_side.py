"""Two steps in one process: different models on different meshes, run alternately, one of them failing in between."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiler_trainer as ct
from compiler_trainer.config.errors import UserError


class Dense(nn.Module):
    """A model of linear layers, two of which share a name with those of `Sequences`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Sequences(nn.Module):
    """A model with causal attention."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(11, 8), nn.Linear(8, 24, bias=False)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        embed, qkv = self.layers
        q, k, v = (x[:, None] for x in qkv(embed(tokens)).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def squared(model, batch):
    return model(batch["x"]).square().mean()


def next_token(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


OPTIONS = {
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "max_norm": None},
    "lower": {"backend": "eager"},
    "ranks": "lockstep",
}


class Pair:
    """A step on a mesh, and the same model trained by eager PyTorch."""

    def __init__(self, model, loss, batch, mesh):
        self.plain, self.loss, self.batch = copy.deepcopy(model), loss, batch
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.step = ct.compile_step(model, loss, batch, mesh=mesh, **OPTIONS)

    def take(self):
        self.optimizer.zero_grad()
        loss = self.loss(self.plain, self.batch)
        loss.backward()
        self.optimizer.step()
        assert self.step(self.batch)["loss"] == pytest.approx(loss.item(), rel=1e-12)

    def check(self):
        state = self.step.state_dict()
        for name, value in self.plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.fixture
def pairs():
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 9))
    dense = Pair(Dense().double(), squared, {"x": torch.rand(6, 8).double()}, {"dp_shard": 2, "tp": 2})
    sequences = Pair(Sequences().double(), next_token, {"x": tokens, "labels": tokens}, {"dp_replicate": 2, "cp": 2})
    return dense, sequences


def test_steps_on_two_meshes_take_turns(pairs):
    for _ in range(3):
        for pair in pairs:
            pair.take()
    for pair in pairs:
        pair.check()


def test_one_that_fails_leaves_the_other_right(pairs):
    dense, sequences = pairs
    dense.take()
    sequences.take()
    with pytest.raises((UserError, ValueError)):
        dense.step({"x": torch.rand(6, 7).double()})  # a batch of another width
    with pytest.raises(UserError):  # compilation refuses: a model that is never called
        ct.compile_step(Dense().double(), lambda model, batch: batch["x"].sum(), dense.batch, mesh={"tp": 2}, **OPTIONS)
    sequences.take()
    dense.take()
    for pair in pairs:
        pair.check()
