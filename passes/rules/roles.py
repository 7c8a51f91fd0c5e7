"""Find parameters used as embeddings or in the last matmul, from the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import is_operator, name_of
from passes.rules import rule_of, tensor_operands
from passes.rules.losses import IN_CHUNKS

MATMULS = ("linear", "mm", "matmul")


def keeps_dims(node: fx.Node) -> bool:
    """Return True if an operator keeps its operand's dims: reordered, with new dims of size 1, or cast."""
    if name_of(node) in ("_to_copy", "alias"):
        return True
    rule = rule_of(node)
    before, after = (sorted(filter(None, dims[0])) for dims in (rule.operands, rule.results))
    return rule.moves and before == after


def root(node: fx.Node, parameters: Collection[fx.Node]) -> fx.Node | None:
    """Return the parameter whose transpose, cast or view with the same dims the node is; None if there is none."""
    while node not in parameters:
        if not is_operator(node) or len(tensor_operands(node)) != 1 or not keeps_dims(node):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return node


def last_of(program: ir.Program, layers: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of `layers` whose results reach no other of them."""
    before = set[fx.Node]()  # nodes whose results reach a layer
    for node in reversed(list(program.calls())):
        if any(user in before or user in layers for user in node.users):
            before.add(node)
    return set(layers) - before


def roles(program: ir.Program) -> Mapping[str, frozenset[str]]:
    """Map parameter names to `embedding`, `head` or both; parameters without a role are left out."""
    names = {n: i.name for n, i in zip(program.placeholders(), program.inputs) if i.kind in ir.WEIGHTS}
    matmul_names = (*MATMULS, *IN_CHUNKS)
    matmuls = [n for n in program.calls() if name_of(n) in matmul_names]
    uses = [("head", operand) for node in last_of(program, matmuls) for operand in tensor_operands(node)[:2]]
    lookups = (n for n in program.calls() if n.target is torch.ops.aten.embedding.default)
    uses += [("embedding", tensor_operands(node)[0]) for node in lookups]
    result: dict[str, frozenset[str]] = {}
    for role, operand in uses:
        if (parameter := root(operand, names.keys())) is not None:
            result[names[parameter]] = result.get(names[parameter], frozenset()) | {role}
    return result
