"""Repeated values keep their placement, and so do pairs of numbers viewed as complex ones."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import assert_same, compile_lockstep
from torch import nn

MESHES = ({"dp_shard": 2}, {"dp_shard": 3}, {"tp": 2}, {"tp": 3}, {"cp": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2})
PLAN = {"q.weight": {"tp": 0}, "o.weight": {"tp": 1}}


class Rotary(nn.Module):
    """Positions rotated as complex numbers, as in the first Llama and in Llama 4, with heads of three pairs."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(8, 24, bias=False), nn.Linear(24, 6, bias=False)
        self.register_buffer("rates", torch.rand(3))

    def forward(self, x):
        angles = torch.arange(x.shape[1]).to(x.dtype)[:, None] * self.rates
        turns = torch.polar(torch.ones_like(angles), angles)
        q = torch.view_as_complex(self.q(x).unflatten(-1, (4, 3, 2)))
        return self.o(torch.view_as_real(q * turns[None, :, None]).flatten(2))


class Repeated(nn.Module):
    """A weight repeated for each row, and features repeated twice."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(8, 6, bias=False), nn.Linear(12, 6, bias=False)
        self.w = nn.Parameter(torch.randn(6, 5))

    def forward(self, x):
        y = self.q(x)
        return torch.bmm(self.o(y.repeat(1, 1, 2)), self.w.repeat(x.shape[0], 1, 1))


def loss(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("form", [Rotary, Repeated])
@pytest.mark.sample(2)
def test_loss_and_gradients_are_those_of_one_device(form, mesh):
    torch.manual_seed(0)
    alone, batch = form().double(), {"x": torch.randn(4, 5, 8, dtype=torch.float64)}
    model = copy.deepcopy(alone)
    wanted = loss(alone, batch)
    wanted.backward()
    passes = {"shard": {"plan": PLAN}} if "tp" in mesh else {}
    step = compile_lockstep(model, loss, batch, mesh, {"name": "sgd", "max_norm": None}, passes=passes)
    assert step(batch, lr=1.0)["loss"] == pytest.approx(wanted.item(), rel=1e-12)
    moved = {name: (p - p.grad).detach() for name, p in alone.named_parameters()}
    assert_same({name: step.state_dict()[name] for name in moved}, moved, 1e-12)


@pytest.mark.parametrize("form", [Rotary, Repeated])
def test_nothing_is_gathered_over_tp(form):
    torch.manual_seed(0)
    model, batch, graphs = form().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}, {}
    passes = {"shard": {"plan": PLAN, "sequence_parallel": False}}
    compile_lockstep(model, loss, batch, {"tp": 2}, passes=passes, observe=lambda p, r: graphs.setdefault(r.name, p))
    targets = {str(node.target) for node in graphs["shard"].calls()}
    assert not any("gather" in target for target in targets), targets
