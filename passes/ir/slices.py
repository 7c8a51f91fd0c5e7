"""Parts of a graph by what they depend on: a batch alone, constants alone, or parameters alone.

The part that depends on a batch alone becomes a program of its own, on one device. Nodes that depend on constants, such
as the mask of a sliding window, are evaluated. Values of parameters are gathers of them, casts and quantized copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.operators import is_random
from passes.ir.spec import Spec


def reach(starts: Iterable[fx.Node], onward: Callable[[fx.Node], Sequence[fx.Node]]) -> dict[fx.Node, None]:
    """Return `starts` and the nodes to which `onward` leads from them, depth first."""
    reached, waiting = dict[fx.Node, None](), list(starts)  # an explicit stack: chains are as long as programs
    while waiting:
        if (node := waiting.pop()) not in reached:
            reached[node] = None
            waiting += reversed(onward(node))
    return reached


def cone_of(node: fx.Node, ends: Set[fx.Node]) -> set[fx.Node]:
    """Return the node and all nodes it depends on, up to `ends`."""
    return set(reach([node], lambda node: [] if node in ends else node.all_input_nodes))


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
    return program.with_graph(graph, inputs=inputs, outputs=outputs, folds=(), bounds=None)


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


def weight_nodes(program: ir.Program, tables: Set[fx.Node] = frozenset()) -> list[fx.Node]:
    """Return the operators on parameters, and on coordinates, constants and `tables` (inputs), in order."""
    kinds = {node: input_.kind for node, input_ in zip(program.placeholders(), program.inputs, strict=True)}
    weights = {node for node, kind in kinds.items() if kind in ir.WEIGHTS}
    constants = {node for node, kind in kinds.items() if kind == "coordinate"} | tables
    nodes = []
    for node in program.calls():
        operands = set(node.all_input_nodes) - constants
        if not operands:
            constants.add(node)
        elif operands <= weights:
            weights.add(node)
            nodes.append(node)
    return nodes
