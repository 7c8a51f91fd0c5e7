"""Pieces of a tensor that are joined again become a reshape, with the same values on every mesh."""

from __future__ import annotations

import pytest
import torch
from oracle import NO_DECAY, trained_alike
from torch import nn

from compiler_trainer.capture.capture import capture
from passes.ir.operators import name_of
from passes.sharding.pieces import rejoin
from tests.nightly.models.judge import gathering_operators

MESHES = [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}]


class Taken(nn.Module):
    """Two linear layers, between which rows [6, 4, 3] become [24, 3]."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(3, 3), nn.Linear(3, 2), function

    def forward(self, x):
        return self.down(self.function(torch.tanh(self.up(x))))


JOINED = {
    "list": lambda x: torch.cat(list(x)),
    "split": lambda x: torch.cat([part.reshape(-1, 3) for part in x.split([2, 4])]),
    "chunk": lambda x: torch.cat([part.flatten(0, 1) for part in x.chunk(3)]),
    "one": lambda x: torch.cat([x.flatten(0, 1)]),
}
APART = {
    "other order": lambda x: torch.cat(list(x)[::-1]),
    "some": lambda x: torch.cat(list(x)[:5]),
    "other dim": lambda x: torch.cat(list(x), -1),
    "turned": lambda x: torch.cat([part.t() for part in x]),
}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, 4, 3, generator=generator, dtype=torch.float64)} for _ in range(3)]


def loss(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_joined_rows_stay_on_their_ranks(name, mesh):
    step = trained_alike(Taken(JOINED[name]).double(), loss, batches(), mesh, NO_DECAY)
    assert gathering_operators(step) == []


@pytest.mark.parametrize("name", [*JOINED, *APART])
def test_only_all_pieces_in_order_are_joined(name):
    function = {**JOINED, **APART}[name]
    fixed = Taken(lambda x: function(x)[..., :3] if name != "turned" else function(x).sum(-1, keepdim=True).expand(-1, 3))
    program, ctx = capture(fixed.double(), loss, batches()[0], torch.device("cpu"))
    assert rejoin(program, ctx) == (name in JOINED)
    assert any(name_of(node) == "cat" for node in program.calls()) == (name in APART)
