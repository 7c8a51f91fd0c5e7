"""The order of a program's nodes as data: schedulers move nodes in it, and it is applied to the graph once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from torch import fx

from passes.cost.fusion import WAITS
from passes.ir.operators import started


class NodeOrder:
    """The nodes of a graph in an order that can be changed, and each node's place."""

    def __init__(self, graph: fx.Graph):
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}

    def calls(self) -> list[fx.Node]:
        """Return the operators in order."""
        return [node for node in self.nodes if node.op == "call_function"]

    def before(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the operators before a node, the nearest first."""
        nearest = (self.nodes[i] for i in range(self.place[node] - 1, -1, -1))
        yield from (other for other in nearest if other.op == "call_function")

    def after(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the operators after a node, the nearest first."""
        nearest = (self.nodes[i] for i in range(self.place[node] + 1, len(self.nodes)))
        yield from (other for other in nearest if other.op == "call_function")

    def between(self, start: fx.Node, wait: fx.Node) -> list[fx.Node]:
        """Return the nodes between a collective and its wait, the last first."""
        return self.nodes[self.place[start] + 1 : self.place[wait]][::-1]

    def first(self, *nodes: fx.Node) -> fx.Node:
        """Return the node that comes before the others."""
        return min(nodes, key=self.place.__getitem__)

    def put_before(self, node: fx.Node, target: fx.Node) -> None:
        """Move a node to right before `target`."""
        old, new = self.place[node], self.place[target]
        new -= old < new
        self.nodes.insert(new, self.nodes.pop(old))
        low, high = sorted((old, new))
        self.place.update(zip(self.nodes[low : high + 1], range(low, high + 1)))

    def put_after(self, node: fx.Node, target: fx.Node) -> None:
        """Move a node to right after `target`."""
        self.put_before(node, self.nodes[self.place[target] + 1])

    def lift(self, node: fx.Node, target: fx.Node) -> None:
        """Move a node from after `target` to right before it, with the operands that it needs there."""
        waiting = [(node, target)]  # an explicit stack, because chains are as long as programs
        while waiting:
            node, target = waiting.pop()
            if self.place[target] < self.place[node]:
                self.put_before(node, target)
                waiting += [(operand, node) for operand in reversed(node.all_input_nodes)]

    def sink(self, node: fx.Node, target: fx.Node) -> None:
        """Move a node from before `target` to right after it, with its users before `target`."""
        waiting = [(node, target)]
        while waiting:
            node, target = waiting.pop()
            if self.place[node] < self.place[target]:
                self.put_after(node, target)
                waiting += [(user, node) for user in reversed(node.users)]


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
    order = NodeOrder(graph)
    last = ((wait, (n for n in order.between(start, wait) if n in matmuls)) for start, wait in in_flight(order.nodes))
    return {wait: matmul for wait, between in last if (matmul := next(between, None))}
