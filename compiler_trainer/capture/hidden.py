"""Handle operations that `torch.export` does not see: record them as operators, or refuse them with their line."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compiler_trainer.capture.records import is_library
from compiler_trainer.capture.spectra import istft
from compiler_trainer.config.errors import UserError
from passes.torch_private import (
    conversions_as,
    derivatives_as_operators,
    inference_as_no_grad,
    tensor_checks_as,
    unvalidated_distributions,
)


def line(error: BaseException | None = None) -> str:
    """Return `file.py:line ` of the innermost frame of the user's code.

    The frame is that of an error, or the current one for None; the text is empty if there is none.
    """
    stack = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    frames = [f for f in stack if not is_library(f.filename)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} " if frames else ""


@contextmanager
def hidden_as_operators() -> Iterator[None]:
    """Record the operations of this module as operators, or raise UserError naming their line, in the block."""
    with (
        ReplacementMode(),
        conversions_as(refuse_conversion),
        unvalidated_distributions(),
        tensor_checks_as(drop_check),
        derivatives_as_operators(refuse("takes derivatives by torch.func.vjp", "use torch.func.grad")),
        patch.object(Tensor, "register_hook", refuse(*HOOK)),
        inference_as_no_grad(),
    ):
        yield


HOOK = (
    "hooks a gradient (register_hook), which no step would call",
    "move its code into the backward of a torch.autograd.Function",
)


def refuse(problem: str, fix: str) -> Callable[..., Any]:
    """Return a function that raises UserError with the line of the model that calls it."""

    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise UserError("model", f"{line()}{problem}; {fix}")

    return raise_error


class ReplacementMode(TorchFunctionMode):
    """A mode that calls the functions in `INSTEAD` in place of PyTorch's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return INSTEAD.get(func, func)(*args, **(kwargs or {}))


def drop_check(condition: Tensor, message: Any = None) -> None:
    """Leave out a check of values, such as that there are as many image tokens as features, with a warning."""
    warnings.warn(f"{line()}checks a condition on values, which no step will check", stacklevel=2)


def set_data(old: Tensor, new: Tensor) -> None:
    """Do `old.data = new`; raise UserError if the two differ in shape, dtype or device."""
    old_kind, new_kind = (f"{x.dtype} {list(x.shape)} on {x.device}" for x in (old, new))
    if old_kind != new_kind:
        raise UserError(
            "model", f"{line()}puts {new_kind} into .data of {old_kind}; a graph's tensors keep shape, dtype and device"
        )
    old.detach().copy_(new.detach())


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Call `F.dropout`, or return the operand itself if it is off, where the fake kernel would copy it."""
    return F.dropout(x, p, training, inplace) if training and p else x


def fill_diagonal(x: Tensor, value: complex, wrap: bool = False) -> Tensor:
    """Do `Tensor.fill_diagonal_` with a mask: PyTorch's own writes by strides, whose backward writes in place."""
    if x.dim() < 2 or x.dim() > 2 and len(set(x.shape)) > 1:
        return x.fill_diagonal_(value, wrap)  # raises PyTorch's error
    first, *others = torch.meshgrid([torch.arange(size, device=x.device) for size in x.shape], indexing="ij")
    row = first % (x.shape[1] + 1) if wrap and x.dim() == 2 else first
    is_diagonal = torch.stack([row == other for other in others]).all(0)
    return x.masked_fill_(is_diagonal, value)


INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]  # not an operator
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    F.dropout: dropout,
    Tensor.fill_diagonal_: fill_diagonal,
    Tensor.istft: istft,  # PyTorch's own reads the window's values
    torch.istft: istft,
}


def refuse_conversion(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Return the module for a conversion that changes nothing; raise UserError naming what it would change."""
    for name, old in (*module.named_parameters(), *module.named_buffers()):
        new = convert(old)
        if (new.dtype, new.device) != (old.dtype, old.device):
            problem = f"converts {name!r} of a {type(module).__name__} from {old.dtype} on {old.device}"
            fix = "convert the model before it is compiled, or the values where they are used"
            raise UserError("model", f"{line()}{problem} to {new.dtype} on {new.device}; {fix}")
    return module
