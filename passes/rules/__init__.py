"""The rule table: operator name -> what its dims are made of. `rule_of` is the one way in."""

from __future__ import annotations

import re

from torch import fx

from passes.program.printer import namespace_of
from passes.program.torch_private import OpOverload
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
FAMILIES = (
    contractions, factories, indexing, losses, pointwise, recurrent, reductions, routed, spatial, views
)  # fmt: skip
for _family in FAMILIES:
    _rules = _family.rules()
    if _twice := RULES.keys() & _rules.keys():
        raise ValueError(f"operators with two rules: {sorted(_twice)}")
    RULES |= _rules
OURS = frozenset(RULES)


def name_of(node: fx.Node) -> str:
    """The name in the table of the operator that a node calls."""
    return key_of(node.target)  # type: ignore[arg-type]


def key_of(op: OpOverload) -> str:
    """An operator's name in the table: `linear` for `aten.linear.default`, `my::op` outside aten."""
    name = op._schema.name.partition("::")[2]
    packet = namespace_of(op)
    return name if packet == "aten" else f"{packet}::{name}"


def has_rule(node: fx.Node) -> bool:
    """Whether the table has a rule for the node's operator."""
    return hasattr(node.target, "_schema") and name_of(node) in RULES


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


__all__ = [
    "RULES", "Rule", "add_rule", "has_rule", "is_ours", "key_of", "name_of", "opaque", "rule_of", "tensor_operands"
]  # fmt: skip
