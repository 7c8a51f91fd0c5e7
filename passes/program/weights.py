"""Values computed from parameters alone: gathers of them, casts, quantized copies."""

from __future__ import annotations

from torch import fx

from passes.program import ir


def weight_nodes(program: ir.Program) -> list[fx.Node]:
    """Return the operator nodes computed from parameters, coordinates and constants alone, in order."""
    kinds = {node: input_.kind for node, input_ in zip(program.placeholders(), program.inputs, strict=True)}
    weights = {node for node, kind in kinds.items() if kind == "parameter"}
    constants = {node for node, kind in kinds.items() if kind == "coordinate"}
    nodes = []
    for node in program.calls():
        operands = set(node.all_input_nodes) - constants
        if not operands:
            constants.add(node)
        elif operands <= weights:
            weights.add(node)
            nodes.append(node)
    return nodes
