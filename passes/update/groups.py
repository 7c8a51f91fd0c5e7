"""Groups of parameters that are updated differently from the rest.

Group(replace(adamw, weight_decay=0.0), kinds={"vector"})          norms and biases do not decay
Group(adamw, lr=0.1, names=("encoder.*",))                         a pretrained part learns at a tenth of the rate
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from passes.ir import ir
from passes.update.optimizers import Optimizer


@dataclass(frozen=True)
class Group:
    """Parameters of `kinds` (vector, embedding, head) or named like `names`: their optimizer, `lr` times the rate."""

    optimizer: Optimizer
    lr: float = 1.0
    kinds: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    label: str = "the rest"

    def holds(self, parameter: ir.Input) -> bool:
        """Return True if a parameter belongs to the group."""
        kinds = parameter.roles | ({"vector"} if len(parameter.spec.shape) < 2 else set())
        return bool(self.kinds & kinds) or any(fnmatchcase(parameter.name, pattern) for pattern in self.names)

    def unmatched_patterns(self, parameters: Collection[ir.Input]) -> Iterator[str]:
        """Return the patterns that match no parameter's name."""
        return (p for p in self.names if not any(fnmatchcase(parameter.name, p) for parameter in parameters))


def group_of(parameter: ir.Input, groups: Sequence[Group], default: Optimizer) -> Group:
    """Return the first group that holds a parameter."""
    return next((group for group in groups if group.holds(parameter)), Group(default))
