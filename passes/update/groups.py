"""Groups of parameters that are updated differently from the rest.

Group(replace(adamw, weight_decay=0.0), kinds={"vector"})          norms and biases do not decay
Group(adamw, lr=0.1, names=("encoder.*",))                         a pretrained part learns at a tenth of the rate

Muon updates matrices. In its groups, AdamW updates the other parameters, the head and routers, unless `is_stated`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from passes.ir import ir
from passes.update.optimizers import Muon, Optimizer


@dataclass(frozen=True)
class Group:
    """Parameters of `kinds` or named like `names`: their optimizer, `lr` times the rate.

    If `is_stated`, the user chose this optimizer for all of them.
    """

    optimizer: Optimizer
    lr: float = 1.0
    kinds: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    label: str = "the rest"
    is_stated: bool = False

    def holds(self, parameter: ir.Input) -> bool:
        """Return True if a parameter belongs to the group."""
        by_kind = kind_of(parameter) in self.kinds or self.kinds & parameter.roles
        return bool(by_kind) or any(fnmatchcase(parameter.name, pattern) for pattern in self.names)

    def unmatched_patterns(self, parameters: Collection[ir.Input]) -> Iterator[str]:
        """Return the patterns that match no parameter's name."""
        return (p for p in self.names if not any(fnmatchcase(parameter.name, p) for parameter in parameters))


def kind_of(parameter: ir.Input) -> str:
    """Return "vector" for at most one dim, a use in which a parameter is no matrix to Muon, "matrix", or "other"."""
    if len(parameter.spec.shape) < 2:
        return "vector"
    uses = ("embedding", "head", "router", "matrix", "convolution")
    return next((use for use in uses if use in parameter.roles), "other")


def group_of(parameter: ir.Input, groups: Sequence[Group], default: Optimizer) -> Group:
    """Return the first group that holds a parameter, with the optimizer of the parameter; raise Refused if it is none.

    Muon cannot update vectors, lookup tables, and parameters that no matmul and no convolution of all channels reads.
    """
    group = next((group for group in groups if group.holds(parameter)), Group(default))
    if not isinstance(group.optimizer, Muon) or (kind := kind_of(parameter)) == "matrix":
        return group
    if not group.is_stated:
        return replace(group, optimizer=group.optimizer.others)
    if kind not in ("head", "router"):
        problem = f"muon, but {parameter.name} {list(parameter.spec.shape)} is no matrix of a matmul ({kind})"
        raise ir.Refused("optimize", None, f"optim.groups.{group.label}.optimizer: {problem}; set it to adamw")
    return group
