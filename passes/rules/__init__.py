"""The rule table: operator name -> the factors of its dims. Use `rule_of` to look up a node's rule."""

from __future__ import annotations

import re

from torch import fx

from passes.ir.operators import name_of
from passes.rules import (
    contractions,
    factories,
    indexing,
    linear_attention,
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
ADDED: dict[str, RuleMaker | str] = {}  # the arguments of `add_rule`, by operator name
FAMILIES = (
    contractions, factories, indexing, linear_attention, losses, pointwise, recurrent, reductions, routed, spatial,
    views,
)  # fmt: skip
for _family in FAMILIES:
    if _twice := RULES.keys() & _family.RULES.keys():
        raise ValueError(f"operators with two rules: {sorted(_twice)}")
    RULES |= _family.RULES
OURS = frozenset(RULES)


def has_rule(node: fx.Node) -> bool:
    """Return True if the table has a rule for the node's operator."""
    return name_of(node) in RULES


def is_ours(node: fx.Node) -> bool:
    """Return True if the operator belongs to PyTorch or has had a rule here from the start."""
    return node.target.namespace in ("aten", "prims") or name_of(node) in OURS  # type: ignore[union-attr]


def rule_of(node: fx.Node) -> Rule:
    """Return the node's rule; without one in the table, every operand has to be gathered."""
    return RULES[name_of(node)](node) if has_rule(node) else opaque(node)


def add_rule(name: str, rule: RuleMaker | str) -> None:
    """Add an operator's rule.

    Args:
        name: `namespace::name`; for an operator of PyTorch, `aten::name`.
        rule: the rule as text (`...k, nk -> ...n; sum k`), or a function from the operator's node to a `Rule`.

    Raises:
        ValueError: the name or the text is malformed.
    """
    if not re.fullmatch(r"\w+::\w+", name):
        raise ValueError(f"{name!r} is not an operator name; write `namespace::name`, without an overload")
    RULES[name.removeprefix("aten::")] = from_text(rule) if isinstance(rule, str) else rule
    ADDED[name] = rule


__all__ = ["ADDED", "RULES", "Rule", "add_rule", "has_rule", "is_ours", "opaque", "rule_of", "tensor_operands"]
