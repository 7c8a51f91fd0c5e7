"""Averages of weights over steps (EMA): a second copy of the weights, in float32 or wider, that follows them slowly.

    average <- ema * average + (1 - ema) * weight      after each step, on the rank's own shards

Averages are part of the step's state, so checkpoints store them and any mesh can read them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Checkpoint
from compiler_trainer.checkpoint.load import AVERAGE, MODEL
from compiler_trainer.step.step import State, Step


@torch.no_grad()
def follow(step: Step, ema: float, is_applied: Tensor | None) -> None:
    """Update the averages after a step, unless `is_applied`, bool[] on the device, is False because it was skipped."""
    share = 1 - ema if is_applied is None else (1 - ema) * is_applied.double()
    for name, average in step.state.items():
        if name.startswith(AVERAGE):
            weight = step.state[MODEL + name.removeprefix(AVERAGE)]
            for rank, local in average.local.items():
                amount = share if isinstance(share, float) else share.to(local.dtype)
                local.lerp_(weight.local[rank].to(local.dtype), amount)


def add(step: Step, names: Iterable[str]) -> None:
    """Add averages of the parameters called `names` to a step's state."""
    for name in names:
        weight = step.state[MODEL + name]
        dtype = torch.promote_types(weight.like.dtype, torch.float32)
        local = {rank: value.detach().to(dtype, copy=True) for rank, value in weight.local.items()}
        step.state[AVERAGE + name] = State(weight.spec, local, weight.like.to(dtype), weight.stages)


def load(step: Step, ckpt: Checkpoint, frozen: frozenset[str]) -> None:
    """Load a checkpoint into a step's state, except for `frozen` entries, which come from elsewhere.

    Averages that the checkpoint lacks start as copies of the weights.
    """
    checkpoint.load(step, ckpt, frozen | averages_of(step))
    for name in averages_of(step) - ckpt.index.tensors.keys():
        weight = step.state[MODEL + name.removeprefix(AVERAGE)]
        for rank, local in step.state[name].local.items():
            local.copy_(weight.local[rank])


def averages_of(step: Step) -> frozenset[str]:
    """Return the names of the averages in a step's state."""
    return frozenset(name for name in step.state if name.startswith(AVERAGE))
