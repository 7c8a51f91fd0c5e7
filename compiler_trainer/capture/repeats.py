"""Find layers that no numbered module tells: parts of a graph that are alike and read each the one before.

    %a  = linear(%x, %w0)       part 0: functions of a list of parameters, entries of a ModuleDict, one block in a loop
    %b  = add(%x, %a)
    %a1 = linear(%b, %w1)       part 1: the same operators on values that lie alike; of part 0 it reads %b
    %b1 = add(%b, %a1)
    %m  = mean(%b1)

Operators are compared in order, those aside that nothing of a batch is in (a mask, a slice of stacked weights). A part
begins where the fewest values are alive, so that between layers with a residual stream this alone is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from passes.program import ir
from passes.program.bodies import describe_operand
from passes.program.printer import format_value


class Run(NamedTuple):
    """So many `parts` of `size` operators in a row, from the operator number `first`."""

    first: int
    size: int
    parts: int

    @property
    def end(self) -> int:
        """The operator after the last."""
        return self.first + self.size * self.parts


def repeats(nodes: Sequence[fx.Node], data: Collection[fx.Node]) -> list[list[list[fx.Node]]]:
    """Runs of parts that repeat, part by part; `nodes` are operators in order, `data` what a batch goes through."""
    texts: dict[Any, int] = {}
    numbers = [texts.setdefault(text_of(node, data), len(texts)) for node in nodes]
    runs = Search(nodes, numbers, data).within(0, len(nodes))
    return [[list(nodes[i : i + run.size]) for i in range(run.first, run.end, run.size)] for run in runs]


def text_of(node: fx.Node, data: Collection[fx.Node]) -> Any:
    """What an operator computes of values, whichever they are, and of what is given in which shapes."""
    words = {n: "value" if n in data else f"given {format_value(ir.value(n))}" for n in node.all_input_nodes}
    try:
        operands = describe_operand((node.args, node.kwargs), words)
    except ir.CompileError:  # a constant without a text
        return node
    return node.target, operands, format_value(ir.value(node))


class Search:
    """Where a sequence of operators, known by numbers that those alike share, repeats itself."""

    def __init__(self, nodes: Sequence[fx.Node], numbers: Sequence[int], data: Collection[fx.Node]):
        self.nodes, self.numbers, self.data = nodes, torch.tensor(numbers), data
        self.place = {node: i for i, node in enumerate(nodes)}
        self.alive = self.count_alive()

    def count_alive(self) -> list[int]:
        """How many values of operators before each are read by it or by later ones."""
        change = [0] * (len(self.nodes) + 2)
        for i, node in enumerate(self.nodes):
            last = max((self.place.get(user, len(self.nodes)) for user in node.users), default=i)
            change[i + 1] += 1
            change[last + 1] -= 1
        return torch.tensor(change).cumsum(0).tolist()

    def within(self, first: int, end: int) -> Iterator[Run]:
        """The run of most operators in a stretch, and those before and after it."""
        if run := next(filter(self.is_chain, self.candidates(first, end)), None):
            yield from self.within(first, run.first)
            yield run
            yield from self.within(run.end, end)

    def candidates(self, first: int, end: int) -> list[Run]:
        """Runs of operators alike, those of most operators first, of the smallest parts among these."""
        found = []
        for size in range(1, (end - first) // 2 + 1):
            alike = self.numbers[first + size : end] == self.numbers[first : end - size]
            if int(alike.sum()) < size:
                continue
            breaks = [-1, *(~alike).nonzero().flatten().tolist(), len(alike)]
            for before, after in zip(breaks, breaks[1:]):
                if (length := after - before - 1) >= size:
                    found.append(self.placed(first + before + 1, size, length + size))
        return sorted(found, key=lambda run: (-run.size * run.parts, run.size))

    def placed(self, first: int, size: int, length: int) -> Run:
        """As many parts as the operators have room for, cut where the fewest values are alive."""
        parts, rest = divmod(length, size)
        return Run(min(range(first, first + rest + 1), key=lambda i: self.alive[i + size]), size, parts)

    def is_chain(self, run: Run) -> bool:
        """Whether each part multiplies a matrix by what the part before computes, and all read what lies alike."""
        second = run.first + run.size
        if not self.multiplies(set(self.nodes[run.first : second]), self.nodes[second : second + run.size]):
            return False
        pairs = zip(self.operands(second, run.end), self.operands(run.first, run.end - run.size), strict=True)
        firsts = len(self.operands(second, second + run.size))
        return all(self.lie_alike(a, b, run, is_second=i < firsts) for i, (a, b) in enumerate(pairs))

    def multiplies(self, given: set[fx.Node], part: Sequence[fx.Node]) -> bool:
        """Whether a part multiplies a matrix by something computed from what is given: a sum of branches does not."""
        reached = set(given)
        for node in part:
            if not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        return any(map(self.is_matrix, (n for node in reached - given for n in node.all_input_nodes)))

    def operands(self, first: int, end: int) -> list[fx.Node]:
        """What operators in a row read, in order."""
        found: list[fx.Node] = []
        for node in self.nodes[first:end]:
            fx.map_arg((node.args, node.kwargs), found.append)
        return found

    def is_matrix(self, node: fx.Node) -> bool:
        """Whether a value is a weight of a product: of two dims or more, and nothing of a batch in it."""
        given = node not in self.data and ir.is_tensor(node)
        return given and ir.example(node).dim() >= 2 and ir.may_have_gradient(node)

    def lie_alike(self, a: fx.Node, b: fx.Node, run: Run, is_second: bool) -> bool:
        """Whether an operand is to a part what another is to the part before; the first reads what the run is given."""
        at, before = self.place.get(a, -1), self.place.get(b, -1)
        if at < run.first:
            return before < run.first
        return at - before == run.size or a is b or is_second and before < run.first
