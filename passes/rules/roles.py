"""What parameters are used for, as the graph shows it: looked up as an embedding, or the last product."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from passes.program import ir
from passes.program.operators import is_operator, name_of
from passes.rules import rule_of, tensor_operands
from passes.rules.losses import IN_CHUNKS

PRODUCTS = ("linear", "mm", "matmul")


def keeps_dims(node: fx.Node) -> bool:
    """Whether an operator leaves the dims of its one operand: in another order, with new ones of size one, cast."""
    if name_of(node) in ("_to_copy", "alias"):
        return True
    rule = rule_of(node)
    before, after = (sorted(filter(None, dims[0])) for dims in (rule.operands, rule.results))
    return rule.moves and before == after


def root(node: fx.Node, parameters: Collection[fx.Node]) -> fx.Node | None:
    """The parameter of which the node is a transpose, a cast or a view with its dims, if it is."""
    while node not in parameters:
        if not is_operator(node) or len(tensor_operands(node)) != 1 or not keeps_dims(node):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return node


def last_of(program: ir.Program, layers: Collection[fx.Node]) -> set[fx.Node]:
    """Those of the layers whose results reach no other."""
    before = set[fx.Node]()  # nodes that a layer follows
    for node in reversed(list(program.calls())):
        if any(user in before or user in layers for user in node.users):
            before.add(node)
    return set(layers) - before


def roles(program: ir.Program) -> Mapping[str, frozenset[str]]:
    """Parameter name -> `embedding`, `head` or both; the others have none."""
    names = {n: i.name for n, i in zip(program.placeholders(), program.inputs) if i.kind == "parameter"}
    named = (*PRODUCTS, *IN_CHUNKS)
    products = [n for n in program.calls() if name_of(n) in named]
    uses = [("head", operand) for node in last_of(program, products) for operand in tensor_operands(node)[:2]]
    lookups = (n for n in program.calls() if n.target is torch.ops.aten.embedding.default)
    uses += [("embedding", tensor_operands(node)[0]) for node in lookups]
    found: dict[str, frozenset[str]] = {}
    for role, operand in uses:
        if (parameter := root(operand, names.keys())) is not None:
            found[names[parameter]] = found.get(names[parameter], frozenset()) | {role}
    return found
