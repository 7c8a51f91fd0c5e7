"""Parts of a graph by what they depend on: a batch alone, constants alone, or parameters alone.

The part that depends on a batch alone becomes a program of its own, on one device. Nodes that depend on constants, such
as the mask of a sliding window, are evaluated. Values of parameters are gathers of them, casts and quantized copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.operators import is_random
from passes.ir.spec import Spec


def cone_of(node: fx.Node, ends: Set[fx.Node]) -> set[fx.Node]:
    """Return the node and all nodes it depends on, up to `ends`."""
    cone, waiting = set[fx.Node](), [node]
    while waiting:
        node = waiting.pop()
        if node not in cone:
            cone.add(node)
            waiting += [] if node in ends else node.all_input_nodes
    return cone


def backward_slice(program: ir.Program, ends: Mapping[fx.Node, ir.Input], results: Sequence[fx.Node]) -> ir.Program:
    """Return a program that computes the results from those of `ends` on which they depend."""
    cone = set[fx.Node]().union(*(cone_of(node, ends.keys()) for node in results))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node in cone:
            copies[node] = ir.copy_node(graph, node, copies)
    graph.output(tuple(copies[node] for node in results))
    inputs = tuple(input_ for node, input_ in ends.items() if node in cone)
    outputs = tuple(ir.Output(node.name, "metric", Spec.whole(tuple(ir.example(node).shape))) for node in results)
    return program.with_graph(graph, inputs=inputs, outputs=outputs, fold=None, bounds=None)


LARGEST = 2**28  # most entries of a tensor computed at compile time


def constant(node: fx.Node) -> Tensor | None:
    """Return the node's value; None if it depends on an input or a random number, or is too large."""
    needed: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current.op != "call_function" or is_random(current):
            return None
        if ir.is_tensor(current) and ir.example(current).numel() > LARGEST:
            return None
        needed[current] = None
        stack += [n for n in current.all_input_nodes if n not in needed]
    values: dict[fx.Node, object] = {}
    with torch.no_grad():
        for step in node.graph.nodes:
            if step in needed:
                args, kwargs = fx.map_arg((step.args, step.kwargs), values.__getitem__)
                values[step] = step.target(*args, **kwargs)
    return values[node]  # type: ignore[return-value]


def weight_nodes(program: ir.Program) -> list[fx.Node]:
    """Return the operators on parameters, and on coordinates, constants and buffers that stay as they are, in order."""
    inputs, written = dict(zip(program.placeholders(), program.inputs, strict=True)), {o.name for o in program.outputs}
    weights = {node for node, input_ in inputs.items() if input_.kind in ir.WEIGHTS}
    constants = {n for n, i in inputs.items() if i.kind == "coordinate" or i.kind == "buffer" and i.name not in written}
    nodes = []
    for node in program.calls():
        operands = set(node.all_input_nodes) - constants
        if not operands:
            constants.add(node)
        elif operands <= weights:
            weights.add(node)
            nodes.append(node)
    return nodes
