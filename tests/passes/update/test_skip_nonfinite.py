"""A step without a finite gradient changes nothing, on any mesh and in any storage of state."""

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
    """A model of two layers, with running statistics between them."""

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
    """Return four batches of 8 samples, of which one has an infinity in its last sample."""
    torch.manual_seed(1)
    result = [{"x": torch.randn(8, 4, dtype=dtype), "y": torch.randn(8, 4, dtype=dtype)} for _ in range(4)]
    if bad is not None:
        result[bad]["x"][-1, 1] = math.inf
    return result


@pytest.mark.parametrize(("name", "mesh", "microbatches"), in_turn(OPTIMS, MESHES, [2, 1]), ids=str)
@pytest.mark.sample(2)
def test_a_batch_left_out_is_as_if_it_had_not_been_read(name, mesh, microbatches):
    optim, batches, good = OPTIMS[name], data(bad=1), data()
    step = compile_lockstep(normed(), loss_fn, good[0], mesh, optim, microbatches=microbatches, skip_nonfinite=True)
    plain = compile_lockstep(normed(), loss_fn, good[0], mesh, optim, microbatches=microbatches)
    actual, wanted = [step(batch) for batch in batches], [plain(batch) for batch in (good[0], *good[2:])]
    assert not math.isfinite(actual.pop(1)["grad_norm"])
    assert actual == wanted
    assert_same(step.state_dict(), plain.state_dict(), 0.0)


def loss_with_root(model, batch):
    """Return the loss plus a root whose gradient is NaN if `scale` is zero."""
    out = model(batch["x"])
    return (out - batch["y"]).square().mean() + (out.square() * batch["scale"]).mean().sqrt()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mesh", "microbatches", "bad"), [({}, 2, 0), ({}, 1, 0), ({"dp_shard": 2}, 4, 2), ({"pp": 2, "dp_shard": 2}, 2, 1)], ids=str)
def test_a_finite_loss_with_a_gradient_that_is_no_number_moves_no_buffer(mesh, microbatches, bad):
    batches = [batch | {"scale": torch.ones(8, 4, dtype=torch.float64)} for batch in data()[:2]]
    broken = {name: value.clone() for name, value in batches[1].items()}
    broken["scale"][bad * 8 // microbatches : (bad + 1) * 8 // microbatches] = 0
    options = {"mesh": mesh, "microbatches": microbatches, "optim": OPTIMS["adamw"]}
    stack = nn.Sequential(normed(), normed())
    step = compile_lockstep(stack, loss_with_root, batches[0], skip_nonfinite=True, **options)
    plain = compile_lockstep(stack, loss_with_root, batches[0], **options)
    left_out = [step(batch) for batch in (batches[0], broken, batches[1])][1]
    assert math.isfinite(left_out["loss"]) and not math.isfinite(left_out["grad_norm"])
    for batch in batches:
        plain(batch)
    assert_same(step.state_dict(), plain.state_dict(), 0.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw8bit", "adamwfp8"])
def test_moments_in_eight_bits_stay(name):
    optim = {"name": name, "lr": 0.1}
    batches, good = data(torch.float32, bad=1), data(torch.float32)
    options = {"mesh": {"dp_shard": 2}, "optim": optim, "ranks": "lockstep"}
    step = compile_step(normed(torch.float32, 4096), loss_fn, good[0], skip_nonfinite=True, **options)
    plain = compile_step(normed(torch.float32, 4096), loss_fn, good[0], **options)
    for batch in batches:
        step(batch)
    for batch in (good[0], *good[2:]):
        plain(batch)
    for key, (_, local) in step.tensors().items():
        for rank, tensor in local.items():
            other = plain.tensors()[key][1][rank]
            assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (tensor, other))), key
