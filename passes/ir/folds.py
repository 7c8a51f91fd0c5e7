"""Folds: a deep program with a few of its layers, one of which stands for the omitted layers after it.

    layers.0 1 2 3 4 5 ... 121 122 123 124 125        a model
    layers.0 1 2 3                     124 125        folded: 3 stands for 3 to 123

Passes then do the work of six layers, whatever the depth. At the end, the result for the layer that stands for others
is repeated (`passes/lower/unfold.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from passes.ir.layer import Layer
from passes.ir.record import NodeRecord, Origin, Unset, changed


@dataclass(frozen=True)
class Fold:
    """Layers `stack.number` to `stack.(number + left_out)` are represented by the first of them."""

    stack: str
    number: int
    left_out: int

    def __str__(self) -> str:
        first, last = (f"{self.stack}.{n}" for n in (self.number, self.number + self.left_out))
        return f"{first} stands for {first} to {last}"

    def number_of(self, layer: Layer | Unset | None) -> int | None:
        """Return the number of a layer of the stack; None for other layers."""
        return layer.number if isinstance(layer, Layer) and layer.stack == self.stack else None

    def names(self) -> list[str]:
        """Return the names of the omitted layers."""
        return [f"{self.stack}.{n}" for n in range(self.number + 1, self.number + self.left_out + 1)]

    def holds(self, name: str) -> bool:
        """Return True if a name belongs to an omitted layer."""
        number = number_in(name, self.stack)
        return number is not None and self.number < number <= self.number + self.left_out

    def counted(self, number: int) -> int:
        """Return the number of a layer, not counting the omitted layers."""
        return number if number <= self.number else number - self.left_out

    def record_in_whole(self, record: NodeRecord, missing: int) -> NodeRecord:
        """Return the record of a node in the full program, if `missing` layers before its layer were omitted."""
        role = record.role
        changes: dict[str, Any] = {
            "origin": origin_in_whole(self, record.origin, missing),
            "layer": self.layer_in_whole(record.layer, missing),
            "parameter": self.name_in_whole(record.parameter, missing),
        }
        if role is not None:
            role_layer = self.layer_in_whole(role.layer, missing)
            changes["role"] = replace(role, layer=role_layer, parameter=self.name_in_whole(role.parameter, missing))
        return changed(record, changes)

    def layer_in_whole(self, layer: Layer | Unset | None, missing: int) -> Layer | Unset | None:
        """Return the layer in the full program, if `missing` layers before it were omitted."""
        number = self.number_of(layer)
        return layer if number is None else Layer(self.stack, self.counted(number) + missing)

    def name_in_whole(self, name: str, missing: int) -> str:
        """Return the name of the same object in that layer."""
        number = number_in(name, self.stack) if name else None
        return name if number is None else renumbered(name, self.stack, self.counted(number) + missing)


@cache
def origin_in_whole(fold: Fold, origin: Origin, missing: int) -> Origin:
    """Return the source of a node in the full program, cached because many nodes share it."""
    return replace(origin, modules=tuple(fold.name_in_whole(path, missing) for path in origin.modules))


@dataclass(frozen=True)
class Folding:
    """Parameters of folding: `alike` maps a module or parameter name to the options that apply to it.

    `before` and `after` are the numbers of equal layers kept on each side of the omitted ones: passes treat the ends of
    a model differently, up to that depth. `on_its_way` more are kept if tensors travel between ranks.
    """

    alike: Callable[[str], Hashable]
    before: int
    after: int
    on_its_way: int = 0

    def among(self, ranks: int) -> Folding:
        """Return the folding for a model shared by `ranks` ranks."""
        extra = self.on_its_way if ranks > 1 else 0
        return replace(self, before=self.before + extra, after=self.after + extra, on_its_way=0)


def number_in(name: str, stack: str) -> int | None:
    """Return the layer number in a name: 3 for `layers.3.wq` or `exp_avg.layers.3.wq`, or None."""
    match = _pattern(stack).search(name)
    return int(match[2]) if match else None


@cache
def renumbered(name: str, stack: str, number: int) -> str:
    """Return the name of the same object in another layer."""
    return _pattern(stack).sub(lambda match: f"{match[1]}{stack}.{number}", name, count=1)


@cache
def _pattern(stack: str) -> re.Pattern[str]:
    return re.compile(rf"((?:^|\.)){re.escape(stack)}\.(\d+)(?![^.])")
