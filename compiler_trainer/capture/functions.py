"""Keep custom autograd functions in a capture: `torch.export` traces their forward and drops their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from passes.torch_private import functions_as
from passes.trace import functions


class FakeContext:
    """A stand-in for the `ctx` that a function's forward and backward share."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.dirty: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing: the gradient of such a result is never requested."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: gradients are always tensors."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Keep the operands that the forward has changed."""
        self.dirty = tensors


@contextmanager
def functions_as_operators() -> Iterator[None]:
    """Record each call of a custom `autograd.Function` as an operator, with forward and backward, inside the block."""
    functions.restart()
    with functions_as(record):
        yield


def record(cls: Any, args: tuple) -> tuple[Any, list[Tensor]]:
    """Define and call the operator of one call; return its results, and the operands that it changed."""
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    autocast = autocast_of(args[tensors[0]].device.type if tensors else "cpu")

    def run_forward(operands: tuple[Tensor, ...]) -> tuple[Any, FakeContext, dict[str, Tensor]]:
        all_args = list(args)
        for i, t in zip(tensors, operands):
            all_args[i] = t.clone() if i in changed else t
        ctx = FakeContext(tuple(isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex()) for a in all_args))
        with autocast():
            if cls.setup_context is not torch.autograd.Function.setup_context:
                out = cls.forward(*all_args)
                cls.setup_context(ctx, tuple(all_args), out)
            else:
                out = cls.forward(ctx, *all_args)
        attributes = {k: v for k, v in vars(ctx).items() if isinstance(v, Tensor)}
        return out, ctx, attributes

    def forward(*operands: Tensor) -> tuple[Tensor, ...]:
        out, ctx, attributes = run_forward(operands)
        outs = out if isinstance(out, tuple) else (out,)
        return *outs, *present(ctx.saved_tensors), *attributes.values()

    def backward(*values: Tensor) -> tuple[Tensor | None, ...]:
        saved = values[len(tensors) + results : len(values) - results]
        ctx = FakeContext(example.needs_input_grad)
        for name, value in vars(example).items():
            if not isinstance(value, Tensor) and name not in ("saved_tensors", "dirty"):
                setattr(ctx, name, value)
        remaining = iter(saved)
        ctx.saved_tensors = tuple(None if t is None else next(remaining) for t in example.saved_tensors)
        for name, value in zip(names, remaining):
            setattr(ctx, name, value)
        gradients = cls.backward(ctx, *values[len(values) - results :])
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return tuple(gradients[i] for i in tensors)

    operands, changed = tuple(args[i] for i in tensors), dict[int, int]()
    copies = {i: args[i].clone() for i in tensors}
    out, example, attributes = run_forward(tuple(copies.values()))  # finds results, saved and changed tensors
    outs = out if isinstance(out, tuple) else (out,)
    names, results = list(attributes), len(outs)
    count = results + len(present(example.saved_tensors)) + len(names)
    changed |= {i: position(outs, copy, cls) for i, copy in copies.items() if any(copy is t for t in example.dirty)}
    op = functions.define("fn", cls.__name__, forward, len(operands), count)
    functions.record(op, functions.Function(cls.__name__, forward, backward, results))
    outputs = op(*operands)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    returned = list(outputs[:results])
    for i, result in changed.items():
        returned[result] = args[i].copy_(outputs[result])
    return tuple(returned) if isinstance(out, tuple) else returned[0], [args[i] for i in changed]


def autocast_of(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return the autocast context in which a function is called, because its body is traced later."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), cache_enabled=False)


def position(results: tuple, operand: Tensor, cls: Any) -> int:
    """Return which result of a function is its changed operand; raise UserError if none is."""
    for k, result in enumerate(results):
        if result is operand:
            return k
    raise UserError(cls.__name__, "changes an operand (mark_dirty) that it does not return; return it")


def present(tensors):
    """Return the tensors without None, which `save_for_backward` accepts, too."""
    return [t for t in tensors if t is not None]
