"""The layers of a model: stacks of equal parts, each of which reads the result of the one before it.

    layers.3.attention.wq   ->   layers.3
    layers.3.experts.0.w1   ->   layers.3
    norm                    ->   none

By module names, a layer is a numbered child with siblings; of nested layers, the outermost counts. Operators and inputs
carry their layer from the capture on (`ir.layer`); later code does not look at names to find it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

Kind = Literal["own", "prefetch", "late", "update"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, order=True)
class Layer:
    """A layer of a stack, `layers.3`; layers of one stack are ordered by number."""

    stack: str
    number: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.number}" if self.stack else str(self.number)

    @staticmethod
    def named(name: str) -> Layer:
        """Return the layer of that name."""
        stack, _, number = name.rpartition(".")
        return Layer(stack, int(number))


@dataclass(frozen=True)
class Role:
    """The role of an operator in its layer, once operators are in their order of execution, and the owner of its work.

    own        work of the layer where it is; also everything outside of layers
    prefetch   gathers parameters of another layer
    late       handles gradients of another layer's parameters: sends, waits for, or rearranges them
    update     updates a parameter, after all differentiated operators
    """

    kind: Kind
    phase: str
    layer: Layer | None
    parameter: str = ""


def layer_names(paths: Iterable[str]) -> set[str]:
    """Return the prefixes of module paths that end in a number and have such siblings."""
    children: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                children.setdefault(".".join(parts[:i]), set()).add(".".join(parts[: i + 1]))
    return {child for siblings in children.values() if len(siblings) > 1 for child in siblings}


def layer_of(path: str, names: set[str]) -> Layer | None:
    """Return the outermost of the named layers that contains a module path."""
    return next((Layer.named(prefix) for prefix in prefixes(path) if prefix in names), None)


def within(path: str, pattern: str) -> bool:
    """Return True if a module path, or a module around it, matches the pattern."""
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes(path))


def prefixes(path: str) -> list[str]:
    """Return a module path and those of the modules around it, outermost first."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
