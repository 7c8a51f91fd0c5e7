"""Averages of weights over steps (EMA): a second copy, in float32 or wider, that follows the weights more slowly.

    average <- ema * average + (1 - ema) * weight      after each step, on the shards that a rank has

They are state of the step, so they are stored with it, and read on any mesh.
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
    """Move the averages after an update, unless `is_applied`, bool[] on the device, says that it was left out."""
    share = 1 - ema if is_applied is None else (1 - ema) * is_applied.double()
    for name, average in step.state.items():
        if name.startswith(AVERAGE):
            weight = step.state[MODEL + name.removeprefix(AVERAGE)]
            for rank, local in average.local.items():
                by = share if isinstance(share, float) else share.to(local.dtype)
                local.lerp_(weight.local[rank].to(local.dtype), by)


def add(step: Step, names: Iterable[str]) -> None:
    """Let a step keep averages of the parameters with these names."""
    for name in names:
        weight = step.state[MODEL + name]
        dtype = torch.promote_types(weight.like.dtype, torch.float32)
        local = {rank: value.detach().to(dtype, copy=True) for rank, value in weight.local.items()}
        step.state[AVERAGE + name] = State(weight.spec, local, weight.like.to(dtype), weight.stages)


def load(step: Step, stored: Checkpoint, frozen: frozenset[str]) -> None:
    """Fill the state of a step, but for what is frozen and elsewhere; averages that it lacks begin at the weights."""
    checkpoint.load(step, stored, frozen | averages_of(step))
    for name in averages_of(step) - stored.index.tensors.keys():
        weight = step.state[MODEL + name.removeprefix(AVERAGE)]
        for rank, local in step.state[name].local.items():
            local.copy_(weight.local[rank])


def averages_of(step: Step) -> frozenset[str]:
    """The names of averages in a step's state."""
    return frozenset(name for name in step.state if name.startswith(AVERAGE))
