"""Two steps of different models and meshes in one process do not affect each other, even if one fails midway."""

from __future__ import annotations

import pytest
import torch
from oracle import LRS, NO_DECAY, batches, llama, llama_loss, perceptron, points, squared_error, train_plainly
from torch import nn

from compiler_trainer import compile_step


class Scaled(torch.autograd.Function):
    """Twice x; `factor` of the class is read when the step is compiled."""

    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        ctx.factor = Scaled.factor
        return x * ctx.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


class Scale(nn.Module):
    def forward(self, x):
        return Scaled.apply(x)


SETTINGS = {
    "ring and offloading": (lambda: llama(2), llama_loss, batches, {"mesh": {"cp": 2}, "passes": {"remat": {"policy": "offload"}, "context": {"method": "ring"}}}),
    "stages": (lambda: llama(3), llama_loss, lambda: batches(rows=4), {"mesh": {"pp": 3}, "microbatches": 2}),
    "a custom function": (lambda: perceptron(Scale()), squared_error, points, {"mesh": {"dp_shard": 2, "tp": 2}}),
    "accumulation": (lambda: llama(2), llama_loss, lambda: batches(rows=4), {"mesh": {"dp_shard": 3}, "microbatches": 4}),
}
PAIRS = [("ring and offloading", "stages"), ("a custom function", "accumulation"), ("stages", "a custom function")]


def prepared(name: str):
    """Return a step, its batches, and the losses of a plain loop over them."""
    make, loss, data, how = SETTINGS[name]
    torch.manual_seed(0)
    model, data = make(), data()
    expected, _ = train_plainly(model, loss, data, NO_DECAY, how.get("microbatches", 1))
    step = compile_step(model, loss, data[0], optim=NO_DECAY, ranks="lockstep", **how)
    return step, data, [metrics["loss"] for metrics in expected]


class Failed(Exception):
    """An error planted in the middle of a step."""


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_each_trains_as_alone_while_the_other_fails(pair, monkeypatch):
    (first, data, losses), (other, others, _) = prepared(pair[0]), prepared(pair[1])
    run, trained = other.runtime.run, []

    def fail(*args):
        run(*args)
        raise Failed

    for number, (batch, lr) in enumerate(zip(data, LRS, strict=True)):
        trained.append(first(batch, lr)["loss"])
        monkeypatch.setattr(other.runtime, "run", fail if number == 1 else run)
        if number == 1:
            with pytest.raises(Failed):
                other(others[1], lr)
        else:
            other(others[number], lr)
    assert trained == pytest.approx(losses, abs=1e-10)
