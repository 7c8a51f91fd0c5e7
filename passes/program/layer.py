"""The layers of a model: stacks of parts alike, each of which reads what the one before it computes.

    layers.3.attention.wq   ->   layers.3
    layers.3.experts.0.w1   ->   layers.3
    norm                    ->   none

By the names of modules a layer is a numbered child that has siblings; of layers inside layers the outermost counts.
Operators carry theirs from the capture on (`ir.layer`), inputs too; nothing after it reads names to find them.
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
    """One layer of a stack, `layers.3`; those of one stack are ordered by number."""

    stack: str
    number: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.number}" if self.stack else str(self.number)

    @staticmethod
    def named(name: str) -> Layer:
        """The layer of that name."""
        stack, _, number = name.rpartition(".")
        return Layer(stack, int(number))


@dataclass(frozen=True)
class Role:
    """What an operator is to the layers, once operators stand in the order in which they run, and whose work it is.

    own        work of the layer that it stands in; what stands outside of layers is, too
    prefetch   what parameters of another layer are gathered by
    late       what becomes of gradients of another layer's parameters: sent, waited for, laid out
    update     of a parameter, after all that is differentiated
    """

    kind: Kind
    phase: str
    layer: Layer | None
    parameter: str = ""


def layer_names(paths: Iterable[str]) -> set[str]:
    """Prefixes of module paths that end in a number and have siblings that do."""
    children: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                children.setdefault(".".join(parts[:i]), set()).add(".".join(parts[: i + 1]))
    return {child for siblings in children.values() if len(siblings) > 1 for child in siblings}


def layer_of(path: str, names: set[str]) -> Layer | None:
    """The outermost of the layers so named that a module path lies in."""
    return next((Layer.named(prefix) for prefix in prefixes(path) if prefix in names), None)


def within(path: str, pattern: str) -> bool:
    """Whether a module path, or a module around it, is named like the pattern."""
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes(path))


def prefixes(path: str) -> list[str]:
    """A module path and those of the modules around it, the outermost first."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
