"""A module and a loss of one's own: what `_target_` names, called with the arguments beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Own
from compiler_trainer.models.loss import LossFn
from compiler_trainer.models.skeleton import skeleton


def build_module(given: Own) -> nn.Module:
    """The module that `_target_` makes; raises UserError naming what cannot be found or called so."""
    module = called(given, "model")
    if not isinstance(module, nn.Module):
        raise UserError("model._target_", f"{given['_target_']} makes a {type(module).__name__}, no nn.Module")
    return module


def build(given: Own, dtype: torch.dtype | None) -> nn.Module:
    """Its skeleton."""
    return skeleton(partial(build_module, given), dtype)


def initial(given: Own, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer as the module's constructor draws it, PyTorch's generator seeded with `seed`.

    The whole module is built in memory, for only its constructor knows; a parameter is dropped once it is handed out.
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
    name, arguments = given["_target_"], {key: value for key, value in given.items() if key != "_target_"}
    try:
        found: Callable[..., Any] = get_method(name)
    except (ImportError, ValueError) as error:
        raise UserError("loss._target_", said(error)) from error
    return partial(found, **arguments) if arguments else found


def called(given: Own, group: str) -> Any:
    """What hydra makes of a group of options with a `_target_`; raises UserError with what went wrong."""
    try:
        return instantiate(given, _convert_="all")
    except InstantiationException as error:
        raise UserError(f"{group}._target_", said(error)) from error


def said(error: Exception) -> str:
    """What went wrong at first, on a single line, without hydra's advice; a module not found has to be looked for."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    hint = "; put the folder of its file on PYTHONPATH" if isinstance(cause, ModuleNotFoundError) else ""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}{hint}"
