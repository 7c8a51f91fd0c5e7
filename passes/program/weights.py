"""Values computed from parameters alone: gathers of them, casts, quantized copies."""

from __future__ import annotations

from torch import fx

from passes.program import ir


def weight_nodes(program: ir.Program) -> list[fx.Node]:
    """Return the operator nodes computed from parameters, coordinates and constants alone, in order."""
    kinds = {node: given.kind for node, given in zip(program.placeholders(), program.inputs, strict=True)}
    weights = {node for node, kind in kinds.items() if kind == "parameter"}
    constants = {node for node, kind in kinds.items() if kind == "coordinate"}
    found = []
    for node in program.calls():
        read = set(node.all_input_nodes) - constants
        if not read:
            constants.add(node)
        elif read <= weights:
            weights.add(node)
            found.append(node)
    return found
