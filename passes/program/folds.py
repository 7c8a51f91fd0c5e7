"""A deep program written with few of its layers: one that stands for those left out after it.

    layers.0 1 2 3 4 5 ... 121 122 123 124 125        a model
    layers.0 1 2 3                     124 125        folded up: 3 stands for 3 to 123

Passes do then the work of six layers, whatever the depth. What they made of the layer that stands for others is
repeated in the end (`passes/lower/unfold.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from passes.program.layer import Layer


@dataclass(frozen=True)
class Fold:
    """Layers `stack.number` to `stack.(number + left_out)` stand as the first of them."""

    stack: str
    number: int
    left_out: int

    def __str__(self) -> str:
        first, last = (f"{self.stack}.{n}" for n in (self.number, self.number + self.left_out))
        return f"{first} stands for {first} to {last}"

    def number_of(self, layer: Layer | None) -> int | None:
        """The number of a layer of the stack; None of another."""
        return layer.number if layer is not None and layer.stack == self.stack else None

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

    def meta_in_whole(self, meta: Mapping[str, Any], missing: int) -> dict[str, Any]:
        """What a node carries where so many of the layers before it were left out."""
        other = dict(meta)
        if modules := meta.get("nn_module_stack"):
            other["nn_module_stack"] = {k: (self.name_in_whole(p, missing), kind) for k, (p, kind) in modules.items()}
        if "layer" in meta:
            other["layer"] = self.layer_in_whole(meta["layer"], missing)
        if parameter := meta.get("parameter"):
            other["parameter"] = self.name_in_whole(parameter, missing)
        if role := meta.get("role"):
            layer, parameter = self.layer_in_whole(role.layer, missing), self.name_in_whole(role.parameter, missing)
            other["role"] = replace(role, layer=layer, parameter=parameter)
        return other

    def layer_in_whole(self, layer: Layer | None, missing: int) -> Layer | None:
        """The layer that one is where so many before it were left out."""
        number = self.number_of(layer)
        return layer if number is None else Layer(self.stack, self.counted(number) + missing)

    def name_in_whole(self, name: str, missing: int) -> str:
        """The name of the same thing in that layer."""
        number = number_in(name, self.stack)
        return name if number is None else renumbered(name, self.stack, self.counted(number) + missing)


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
