"""Extract the values that depend only on a batch as a program of their own, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import fx

from passes.program import ir
from passes.program.spec import Spec


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
