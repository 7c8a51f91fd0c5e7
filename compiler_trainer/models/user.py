"""A module and a loss of the user's: `_target_` names a class or function, which is called with the other options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import Own
from compiler_trainer.config.targets import called, function, is_given, name_of
from compiler_trainer.models.loss import LossFn
from compiler_trainer.models.skeleton import skeleton


def build_module(options: Own) -> nn.Module:
    """Return the module that `_target_` makes, a copy if a `Trainer` got it as an object; raise UserError."""
    module = called(options, "model")
    if not isinstance(module, nn.Module):
        raise UserError("model._target_", f"{name_of(options)} makes a {type(module).__name__}, not an nn.Module")
    return copy.deepcopy(module) if is_given(options) else module


def build(options: Own, dtype: torch.dtype | None) -> nn.Module:
    """Return the module's skeleton."""
    return skeleton(partial(build_module, options), dtype)


def initial(options: Own, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer as the module's constructor draws it, PyTorch's generator seeded with `seed`.

    A module that a `Trainer` got as an object keeps its values. The full module is built in memory, because only its
    constructor knows the values; each parameter is dropped once it is yielded.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build_module(options)
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    yield from module.named_buffers()


def loss_of(options: Own) -> LossFn:
    """Return the function of (model, batch) that `_target_` names, with its other arguments bound by name."""
    return function(options, "loss")
