"""What a model does that `torch.export` does not see: written as operators that it sees, or refused with the line."""

from __future__ import annotations

import traceback
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
from passes.program.torch_private import (
    conversions_as,
    derivatives_as_operators,
    inference_as_no_grad,
    unvalidated_distributions,
)


def line(error: BaseException | None = None) -> str:
    """`file.py:line ` of the model's or the loss's own code, where an error was raised or (None) where we are."""
    stack = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    frames = [f for f in stack if not is_library(f.filename)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} " if frames else ""


@contextmanager
def hidden_as_operators() -> Iterator[None]:
    """While on, all that is followed is recorded, or raises UserError naming its line."""
    with (
        Written(),
        conversions_as(unconverted),
        unvalidated_distributions(),
        derivatives_as_operators(refused("takes derivatives by torch.func.vjp", "use torch.func.grad")),
        patch.object(Tensor, "register_hook", refused(*HOOK)),
        inference_as_no_grad(),
    ):
        yield


HOOK = (
    "hooks a gradient (register_hook), which no step would call",
    "put what it does into the backward of a torch.autograd.Function",
)


def refused(what: str, fix: str) -> Callable[..., Any]:
    """A function that raises UserError with the line of the model that calls it."""

    def instead(*args: Any, **kwargs: Any) -> Any:
        raise UserError("model", f"{line()}{what}; {fix}")

    return instead


class Written(TorchFunctionMode):
    """Calls what stands in `INSTEAD` in the place of PyTorch's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return INSTEAD.get(func, func)(*args, **(kwargs or {}))


def put(old: Tensor, new: Tensor) -> None:
    """`old.data = new`; raises UserError if the two differ in shape or dtype."""
    before, after = (f"{x.dtype} {list(x.shape)} on {x.device}" for x in (old, new))
    if before != after:
        raise UserError("model", f"{line()}puts {after} into .data of {before}; one graph has tensors of one kind")
    old.detach().copy_(new.detach())


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout`, which yields its operand itself if it is off; the fake kernel copies it."""
    return F.dropout(x, p, training, inplace) if training and p else x


INSTEAD: dict[Any, Callable[..., Any]] = {
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]  # its own is no operator
    Tensor.data.__set__: put,  # type: ignore[attr-defined]
    F.dropout: dropout,
    Tensor.istft: istft,  # its own looks at the window's values
    torch.istft: istft,
}


def unconverted(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)` and its like, where they change nothing; raises UserError naming what they would change."""
    for name, old in (*module.named_parameters(), *module.named_buffers()):
        new = convert(old)
        if (new.dtype, new.device) != (old.dtype, old.device):
            what = f"converts {name!r} of a {type(module).__name__} from {old.dtype} on {old.device}"
            fix = "convert the model before it is compiled, or the values where they are used"
            raise UserError("model", f"{line()}{what} to {new.dtype} on {new.device}; {fix}")
    return module
