"""A module and a loss of one's own: what `_target_` names, called with the arguments beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.kinds import Own
from compiler_trainer.config.targets import called, function, is_given, name_of
from compiler_trainer.models.loss import LossFn
from compiler_trainer.models.skeleton import skeleton


def build_module(given: Own) -> nn.Module:
    """The module that `_target_` makes, a copy where it was handed over; raises UserError where it is none."""
    module = called(given, "model")
    if not isinstance(module, nn.Module):
        raise UserError("model._target_", f"{name_of(given)} makes a {type(module).__name__}, no nn.Module")
    return copy.deepcopy(module) if is_given(given) else module


def build(given: Own, dtype: torch.dtype | None) -> nn.Module:
    """Its skeleton."""
    return skeleton(partial(build_module, given), dtype)


def initial(given: Own, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer as the module's constructor draws it, PyTorch's generator seeded with `seed`.

    One that was handed over begins as it is. The whole module is built in memory, for only its constructor knows; a
    parameter is dropped once it is handed out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_module(given)
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    yield from module.named_buffers()


def loss_of(given: Own) -> LossFn:
    """The function of (model, batch) that `_target_` names, other arguments given to it by name."""
    return function(given, "loss")
