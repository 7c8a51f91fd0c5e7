"""The rule table: operator name -> what its dims are made of. `rule_of` is the one way in."""

from __future__ import annotations

import re

from torch import fx

from passes.program.operators import name_of
from passes.rules import (
    contractions,
    factories,
    indexing,
    losses,
    pointwise,
    recurrent,
    reductions,
    routed,
    spatial,
    views,
)
from passes.rules.base import Rule, RuleMaker, from_text, opaque, tensor_operands

RULES: dict[str, RuleMaker] = {}
ADDED: dict[str, RuleMaker | str] = {}  # those that were added, as they were given
FAMILIES = (
    contractions, factories, indexing, losses, pointwise, recurrent, reductions, routed, spatial, views
)  # fmt: skip
for _family in FAMILIES:
    _rules = _family.rules()
    if _twice := RULES.keys() & _rules.keys():
        raise ValueError(f"operators with two rules: {sorted(_twice)}")
    RULES |= _rules
OURS = frozenset(RULES)


def has_rule(node: fx.Node) -> bool:
    """Whether the table has a rule for the node's operator."""
    return name_of(node) in RULES


def is_ours(node: fx.Node) -> bool:
    """Whether the node's operator is of PyTorch's own set, or one that the table has had a rule for from the start."""
    return node.target.namespace in ("aten", "prims") or name_of(node) in OURS  # type: ignore[union-attr]


def rule_of(node: fx.Node) -> Rule:
    """The node's rule; every operand whole where the table has none."""
    return RULES[name_of(node)](node) if has_rule(node) else opaque(node)


def add_rule(name: str, rule: RuleMaker | str) -> None:
    """Give an operator a rule, as text (`...k, nk -> ...n; sum k`) or as a function of its node; raises ValueError."""
    if not re.fullmatch(r"\w+::\w+", name):
        raise ValueError(f"{name!r} is no name of an operator; write `namespace::name`, without an overload")
    RULES[name] = from_text(rule) if isinstance(rule, str) else rule
    ADDED[name] = rule


__all__ = ["ADDED", "RULES", "Rule", "add_rule", "has_rule", "is_ours", "opaque", "rule_of", "tensor_operands"]
