"""A step without a finite gradient changes nothing, on any mesh and however state is stored."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_same, compile_lockstep
from sweeps import in_turn
from torch import nn

from compiler_trainer import compile_step

OPTIMS = {
    "adamw": {"name": "adamw", "lr": 0.1, "weight_decay": 0.1},
    "clipped": {"name": "adamw", "lr": 0.1, "max_norm": 0.1},
    "sgd": {"name": "sgd", "lr": 0.1},
    "momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "muon": {"name": "muon", "lr": 0.1, "groups": {"vectors": {"kinds": ["vector"], "optimizer": "adamw"}}},
}
MESHES = [{}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}]


class Normed(nn.Module):
    """Two layers, running statistics between them."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.norm = nn.Linear(4, width, bias=False), nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 4, bias=False)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())


def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def normed(dtype=torch.float64, width: int = 8):
    torch.manual_seed(0)
    return Normed(width).to(dtype)


def data(dtype=torch.float64, bad: int | None = None):
    """Four batches of 8 rows, of which one has an infinity in its last row."""
    torch.manual_seed(1)
    found = [{"x": torch.randn(8, 4, dtype=dtype), "y": torch.randn(8, 4, dtype=dtype)} for _ in range(4)]
    if bad is not None:
        found[bad]["x"][-1, 1] = math.inf
    return found


@pytest.mark.parametrize(("name", "mesh", "microbatches"), in_turn(OPTIMS, MESHES, [2, 1]), ids=str)
@pytest.mark.sample(2)
def test_a_batch_left_out_is_as_if_it_had_not_been_read(name, mesh, microbatches):
    optim, given, good = OPTIMS[name], data(bad=1), data()
    step = compile_lockstep(normed(), loss_fn, good[0], mesh, optim, microbatches=microbatches, skip_nonfinite=True)
    plain = compile_lockstep(normed(), loss_fn, good[0], mesh, optim, microbatches=microbatches)
    found, wanted = [step(batch) for batch in given], [plain(batch) for batch in (good[0], *good[2:])]
    assert not math.isfinite(found.pop(1)["grad_norm"])
    assert found == wanted
    state = step.state_dict()
    if microbatches > 1:  # the first, finite microbatch of the step has moved running statistics
        state = {name: value for name, value in state.items() if not name.startswith("norm.r") and "num" not in name}
        assert all(value.isfinite().all() for value in step.state_dict().values())
    assert_same(state, {name: plain.state_dict()[name] for name in state}, 0.0)


@pytest.mark.parametrize("name", ["adamw8bit", "adamwfp8"])
def test_moments_in_eight_bits_stay(name):
    optim = {"name": name, "lr": 0.1}
    given, good = data(torch.float32, bad=1), data(torch.float32)
    how = {"mesh": {"dp_shard": 2}, "optim": optim, "ranks": "lockstep"}
    step = compile_step(normed(torch.float32, 4096), loss_fn, good[0], skip_nonfinite=True, **how)
    plain = compile_step(normed(torch.float32, 4096), loss_fn, good[0], **how)
    for batch in given:
        step(batch)
    for batch in (good[0], *good[2:]):
        plain(batch)
    for key, (_, local) in step.tensors().items():
        for rank, tensor in local.items():
            other = plain.tensors()[key][1][rank]
            assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (tensor, other))), key
