"""Assignments to a model's state in its forward: buffers get the new values, as if they were written in place.

    self.average = 0.9 * self.average + 0.1 * x     ->     self.average.copy_(0.9 * self.average + 0.1 * x)

torch.export records assignments to buffers of the exported module itself only, which wraps the model here. A graph
cannot carry other state from step to step: a tensor that the next forward would read is refused, a number is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from compiler_trainer.config.errors import UserError


@contextmanager
def as_writes(model: nn.Module, replaced: set[str]) -> Iterator[None]:
    """Turn assignments to buffers in the block into writes; add the names of other tensors that it replaces.

    Raises UserError if a buffer gets another shape, or integers in place of floating-point numbers or vice versa.
    """
    modules = dict(model.named_modules())
    buffers = {(path, name): old for path, m in modules.items() for name, old in m._buffers.items() if old is not None}
    others = {(path, name): old for path, m in modules.items() for name, old in vars(m).items()}
    yield
    values = dict[tuple[str, str], Tensor]()
    for (path, name), old in buffers.items():
        new = modules[path]._buffers.get(name)
        if new is not old:
            check(join(path, name), old, new)
            values[path, name] = new.detach().clone()  # type: ignore[union-attr]  # before writes: two may be swapped
    for (path, name), value in values.items():
        modules[path]._buffers[name] = buffers[path, name].copy_(value)
    for (path, name), old in others.items():
        new = vars(modules[path]).get(name, old)
        if isinstance(old, Tensor) and new is not old:
            replaced.add(join(path, name))
        elif isinstance(old, bool | int | float) and isinstance(new, bool | int | float) and new != old:
            text = f"model: {join(path, name)} changes from {old} to {new} in forward"
            warnings.warn(f"{text}, which later steps do not see; make it a buffer if they should", stacklevel=2)


def check(name: str, old: Tensor, new: Tensor | None) -> None:
    """Raise UserError if a buffer cannot take a new value."""
    if new is None or new.shape != old.shape or new.is_floating_point() != old.is_floating_point():
        text = "None" if new is None else f"{new.dtype} {list(new.shape)}"
        problem = f"buffer {name} of {old.dtype} {list(old.shape)} is assigned {text} in forward"
        raise UserError("model", f"{problem}; keep its shape and kind of numbers")


def refuse_replaced(exported: ExportedProgram, replaced: Set[str]) -> None:
    """Raise UserError if a graph reads a tensor that is no buffer and that the forward replaces."""
    used = {node.name for node in exported.graph.find_nodes(op="placeholder") if node.users}
    for spec in exported.graph_signature.input_specs:
        name = (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.CONSTANT_TENSOR and name in replaced and spec.arg.name in used:
            problem = f"{name} is a tensor that forward reads and replaces, and no buffer"
            raise UserError("model", f"{problem}, so that the next step would not see it; register it as a buffer")


def join(path: str, name: str) -> str:
    """Return the dotted name of an attribute of a module."""
    return f"{path}.{name}" if path else name
