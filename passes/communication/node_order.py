"""Neighbours in the order of a graph's nodes, and collectives in flight."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import takewhile

from torch import fx

from passes.cost.fusion import WAITS
from passes.ir.operators import started


def before(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operators before a node, the nearest first."""
    while (node := node.prev).op != "root":
        if node.op == "call_function":
            yield node


def after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operators after a node, the nearest first."""
    while (node := node.next).op != "root":
        if node.op == "call_function":
            yield node


def between(start: fx.Node, wait: fx.Node) -> Iterator[fx.Node]:
    """Yield the operators between a collective and its wait, the last first."""
    return takewhile(lambda node: node is not start, before(wait))


def put_in_order(nodes: Iterable[fx.Node]) -> None:
    """Reorder the nodes of a graph, starting at the first of them; changes the graph."""
    target: fx.Node | None = None
    for node in nodes:
        if target is not None:
            target.append(node)
        target = node


# ---- collectives in flight --------------------------------------------------------------------------


def in_flight(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each collective with the first of its waits, in the order of the waits."""
    waited = set()
    for node in nodes:
        if node.target in WAITS and (start := started(node)) not in waited:
            waited.add(start)
            yield start, node


def last_matmuls(graph: fx.Graph, matmuls: Container[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, by wait, the last matmul between each collective and its wait, if there is any."""
    last = ((wait, (n for n in between(start, wait) if n in matmuls)) for start, wait in in_flight(graph.nodes))
    return {wait: matmul for wait, inside in last if (matmul := next(inside, None))}
