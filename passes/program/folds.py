"""A deep program written with few of its layers: one that stands for those left out after it.

    layers.0 1 2 3 4 5 ... 121 122 123 124 125        a model
    layers.0 1 2 3                     124 125        folded up: 3 stands for 3 to 123

Passes do then the work of six layers, whatever the depth. What they made of the layer that stands for others is
repeated in the end (`passes/lower/unfold.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from passes.program.layer import Layer
from passes.program.record import NodeRecord, Origin, Unset, changed


@dataclass(frozen=True)
class Fold:
    """Layers `stack.number` to `stack.(number + left_out)` stand as the first of them."""

    stack: str
    number: int
    left_out: int

    def __str__(self) -> str:
        first, last = (f"{self.stack}.{n}" for n in (self.number, self.number + self.left_out))
        return f"{first} stands for {first} to {last}"

    def number_of(self, layer: Layer | Unset | None) -> int | None:
        """The number of a layer of the stack; None of another."""
        return layer.number if isinstance(layer, Layer) and layer.stack == self.stack else None

    def names(self) -> list[str]:
        """The layers that are left out."""
        return [f"{self.stack}.{n}" for n in range(self.number + 1, self.number + self.left_out + 1)]

    def holds(self, name: str) -> bool:
        """Whether a name is of a layer that is left out."""
        number = number_in(name, self.stack)
        return number is not None and self.number < number <= self.number + self.left_out

    def counted(self, number: int) -> int:
        """The number of a layer if those left out are not counted."""
        return number if number <= self.number else number - self.left_out

    def record_in_whole(self, record: NodeRecord, missing: int) -> NodeRecord:
        """Return the record of a node in the whole program, if `missing` of the layers before it were left out."""
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
        """The layer in the whole program, if `missing` of the layers before it were left out."""
        number = self.number_of(layer)
        return layer if number is None else Layer(self.stack, self.counted(number) + missing)

    def name_in_whole(self, name: str, missing: int) -> str:
        """The name of the same thing in that layer."""
        number = number_in(name, self.stack) if name else None
        return name if number is None else renumbered(name, self.stack, self.counted(number) + missing)


@cache
def origin_in_whole(fold: Fold, origin: Origin, missing: int) -> Origin:
    """Return the code that a node comes from in the whole program: cached, because many nodes share it."""
    return replace(origin, modules=tuple(fold.name_in_whole(path, missing) for path in origin.modules))


@dataclass(frozen=True)
class Folding:
    """How layers are left out: `alike` tells what options say of a module or a parameter by its name.

    So many layers alike stay `before` those left out, and `after` them: what passes do at the ends of a model reaches
    that far. What travels between ranks is `on_its_way` through so many more.
    """

    alike: Callable[[str], Hashable]
    before: int
    after: int
    on_its_way: int = 0

    def among(self, ranks: int) -> Folding:
        """How they are left out where so many ranks share a model."""
        more = self.on_its_way if ranks > 1 else 0
        return replace(self, before=self.before + more, after=self.after + more, on_its_way=0)


def number_in(name: str, stack: str) -> int | None:
    """The number of the layer of a stack that a name is of: 3 for `layers.3.wq` or `exp_avg.layers.3.wq`, or None."""
    found = _pattern(stack).search(name)
    return int(found[2]) if found else None


@cache
def renumbered(name: str, stack: str, number: int) -> str:
    """The name that the same thing has in another layer."""
    return _pattern(stack).sub(lambda found: f"{found[1]}{stack}.{number}", name, count=1)


@cache
def _pattern(stack: str) -> re.Pattern[str]:
    return re.compile(rf"((?:^|\.)){re.escape(stack)}\.(\d+)(?![^.])")
