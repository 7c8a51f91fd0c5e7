"""Find layers without numbered modules: parts of a graph that are equal, each of which reads the previous part.

    %a  = linear(%x, %w0)       part 0: functions of a list of parameters, entries of a ModuleDict, one block in a loop
    %b  = add(%x, %a)
    %a1 = linear(%b, %w1)       part 1: the same operators on values of the same layout; it reads %b of part 0
    %b1 = add(%b, %a1)
    %m  = mean(%b1)

Operators are compared in order, without those that do not depend on a batch (a mask, a slice of stacked weights). A
part begins where the fewest values are alive, so that with a residual stream this is the only value between layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from passes.ir import ir
from passes.ir.bodies import describe_operand
from passes.ir.printer import format_value


class Run(NamedTuple):
    """A run of `parts` consecutive parts, of `size` operators each, from operator number `first`."""

    first: int
    size: int
    parts: int

    @property
    def end(self) -> int:
        """The operator after the last."""
        return self.first + self.size * self.parts


def repeats(nodes: Sequence[fx.Node], data: Collection[fx.Node]) -> list[list[list[fx.Node]]]:
    """Return runs of repeating parts; `nodes` are operators in order, `data` the nodes that depend on a batch."""
    texts: dict[Any, int] = {}
    numbers = [texts.setdefault(text_of(node, data), len(texts)) for node in nodes]
    runs = Search(nodes, numbers, data).within(0, len(nodes))
    return [[list(nodes[i : i + run.size]) for i in range(run.first, run.end, run.size)] for run in runs]


def text_of(node: fx.Node, data: Collection[fx.Node]) -> Any:
    """Return an operator's computation as text, in which values of a batch are alike and others have their shapes."""
    words = {n: "value" if n in data else f"given {format_value(ir.value(n))}" for n in node.all_input_nodes}
    try:
        operands = describe_operand((node.args, node.kwargs), words)
    except ir.CompileError:  # it has a constant without a text form
        return node
    return node.target, operands, format_value(ir.value(node))


class Search:
    """A search for repeats in a sequence of operators, in which equal operators have the same number."""

    def __init__(self, nodes: Sequence[fx.Node], numbers: Sequence[int], data: Collection[fx.Node]):
        self.nodes, self.numbers, self.data = nodes, torch.tensor(numbers), data
        self.place = {node: i for i, node in enumerate(nodes)}
        self.alive = self.count_alive()

    def count_alive(self) -> list[int]:
        """Return, for each operator, the number of earlier values that it or later operators read."""
        change = [0] * (len(self.nodes) + 2)
        for i, node in enumerate(self.nodes):
            last = max((self.place.get(user, len(self.nodes)) for user in node.users), default=i)
            change[i + 1] += 1
            change[last + 1] -= 1
        return torch.tensor(change).cumsum(0).tolist()

    def within(self, first: int, end: int) -> Iterator[Run]:
        """Yield the longest run within a range of operators, and the runs before and after it, in order."""
        if run := next(filter(self.is_chain, self.candidates(first, end)), None):
            yield from self.within(first, run.first)
            yield run
            yield from self.within(run.end, end)

    def candidates(self, first: int, end: int) -> list[Run]:
        """Return runs of equal operators, longest first, and among these the one with the smallest parts first."""
        runs = []
        for size in range(1, (end - first) // 2 + 1):
            is_equal = self.numbers[first + size : end] == self.numbers[first : end - size]
            if int(is_equal.sum()) < size:
                continue
            breaks = [-1, *(~is_equal).nonzero().flatten().tolist(), len(is_equal)]
            for last_break, next_break in zip(breaks, breaks[1:]):
                if (length := next_break - last_break - 1) >= size:
                    runs.append(self.place_run(first + last_break + 1, size, length + size))
        return sorted(runs, key=lambda run: (-run.size * run.parts, run.size))

    def place_run(self, first: int, size: int, length: int) -> Run:
        """Return the run with the most parts for `length` operators, starting where the fewest values are alive."""
        parts, slack = divmod(length, size)
        return Run(min(range(first, first + slack + 1), key=lambda i: self.alive[i + size]), size, parts)

    def is_chain(self, run: Run) -> bool:
        """Return True if each part has a matmul that depends on the previous part, and all read values alike."""
        second = run.first + run.size
        if not self.multiplies(set(self.nodes[run.first : second]), self.nodes[second : second + run.size]):
            return False
        pairs = zip(self.operands(second, run.end), self.operands(run.first, run.end - run.size), strict=True)
        firsts = len(self.operands(second, second + run.size))
        return all(self.lie_alike(a, b, run, is_second=i < firsts) for i, (a, b) in enumerate(pairs))

    def multiplies(self, sources: set[fx.Node], part: Sequence[fx.Node]) -> bool:
        """Return True if a part has a matmul of a value that is computed from `given`; a sum of branches has none."""
        dependent = set(sources)
        for node in part:
            if not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
        return any(map(self.is_matrix, (n for node in dependent - sources for n in node.all_input_nodes)))

    def operands(self, first: int, end: int) -> list[fx.Node]:
        """Return the operands of consecutive operators, in order."""
        nodes: list[fx.Node] = []
        for node in self.nodes[first:end]:
            fx.map_arg((node.args, node.kwargs), nodes.append)
        return nodes

    def is_matrix(self, node: fx.Node) -> bool:
        """Return True if a value is a weight of a matmul: two or more dims, and independent of a batch."""
        is_weight = node not in self.data and ir.is_tensor(node)
        return is_weight and ir.example(node).dim() >= 2 and ir.may_have_gradient(node)

    def lie_alike(self, a: fx.Node, b: fx.Node, run: Run, is_second: bool) -> bool:
        """Return True if operand `a` is to a part what `b` is to the previous part.

        In the first part, `b` may come from before the run.
        """
        place, previous = self.place.get(a, -1), self.place.get(b, -1)
        if place < run.first:
            return previous < run.first
        return place - previous == run.size or a is b or is_second and previous < run.first
