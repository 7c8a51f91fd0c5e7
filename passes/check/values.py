"""Check that a pass keeps every value: evaluate returned and stored values once, in numbers modulo a prime.

    add(psum(a, "tp"), psum(b, "tp"))     a * r + b * r      r is the number of psum over tp, which is linear
    psum(add(a, b), "tp")                 (a + b) * r        the same number: reassociate kept the value

Inputs are random numbers. Operators that add, scale and multiply do so with these numbers, a sum over ranks multiplies
by a number of its own, and any other operator is a random function of its operands and arguments. So two expressions
have the same number if algebra turns one into the other, in whatever order, how often and under whatever names they are
computed. Other expressions have different numbers, except with a chance of 2^-61 for each pair. Reading an input after
a write gives another number than before it; every draw of random numbers gives another one.

If collectives are merged, a few entries of each tensor in the bucket are followed (`Moved`): which entry of which
value, of which rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ir.bodies import base_of
from passes.ir.operators import CASTS, argument, is_mutable, is_random, is_view, kind_of, name_of
from passes.ir.stages import Stage
from passes.ops.reshard import RESHARD_OPS
from passes.trace.abstract_eval import Avals, Layout, Value

aten = torch.ops.aten
Finding = tuple[fx.Node | None, str]
PRIME = 2**61 - 1
ENTRIES = 8  # entries followed for each value in a bucket
KEEP = frozenset({"clone", "ct::offload", "ct::reload", "ct::there"})  # operators that return their first operand
SWAPS = frozenset({"t", "transpose"})  # operators that undo themselves


def check_kept(before: Numbers, after: Numbers) -> Iterator[Finding]:
    """Yield the values that both programs return or store, but that differ in the second."""
    if before.program.stage < Stage.BUCKETED <= after.program.stage:
        before, after = before.follow_new(after), after.follow_new(before)
    for (place, *key), number in before.results().items():
        other = after.results().get((place, *key), number)
        if other != number:
            yield after.first_difference(before), f"makes another value of {' '.join(map(repr, key))}, which is {place}"


def number_of(*parts: Any) -> int:
    """Return a digest of some parts, as a number below `PRIME`; Python's own hash is the same for -1 and -2."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=16).digest(), "big") % PRIME


def rational(x: Any) -> int | None:
    """Return a finite Python number modulo the prime; None for anything else."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
        return None
    exact = Fraction(x)
    return exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME


@dataclass
class Numbers:
    """The number of each node of a program; nodes that are `followed` only move entries."""

    program: ir.Program
    avals: Avals
    followed: Collection[fx.Node] = frozenset()
    of: dict[fx.Node, int] = field(default_factory=dict)
    written: dict[fx.Node, int] = field(default_factory=dict)  # base -> number of its contents since the last write
    read_by: dict[tuple[fx.Node, fx.Node], int] = field(default_factory=dict)  # (followed node, operand) -> number
    draws: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for node, input_ in zip(self.program.placeholders(), self.program.inputs, strict=True):
            self.of[node] = number_of("input", input_.kind, input_.name)
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self.of[node] = number_of("attribute", node.target)
            elif node in self.followed:
                self.read_by |= {(node, n): self.read(n) for n in node.all_input_nodes if n not in self.followed}
            elif node.op == "call_function":
                self.of[node] = self.call(node)

    def follow_new(self, other: Numbers) -> Numbers:
        """Return the numbers with nodes followed that the other program lacks."""
        others = {node.name for node in other.program.graph.nodes}
        return Numbers(self.program, self.avals, {node for node in self.program.calls() if node.name not in others})

    def results(self) -> dict[tuple[str, str, str], int]:
        """Return the numbers of returned values and of the inputs' final contents, by kind and name."""
        ends = zip(self.program.results(), self.program.outputs, strict=True)
        inputs = zip(self.program.placeholders(), self.program.inputs, strict=True)
        numbers = {("returned", o.kind, o.name): self.read(n) for n, o in ends}
        return numbers | {("stored", i.kind, i.name): self.written[n] for n, i in inputs if n in self.written}

    def first_difference(self, other: Numbers) -> fx.Node | None:
        """Return the first node whose number differs from that of its name in another program."""
        other_numbers = {node.name: number for node, number in other.of.items()}
        return next((n for n, number in self.of.items() if other_numbers.get(n.name, number) != number), None)

    def read(self, node: fx.Node) -> int:
        """Return the number that reading the node gives at this point."""
        if node in self.followed and node not in self.of:
            self.of[node] = Moved(self, node).number()
        base = base_of(node) if self.written else node
        return number_of("since", self.of[node], self.written[base]) if base in self.written else self.of[node]

    def call(self, node: fx.Node) -> int:
        """Return the number of an operator's result."""
        if is_mutable(node):
            return self.write(node)
        number = self.by_algebra(node)
        if number is None:
            number = number_of(node.target, self.signature(node, node.args), self.signature(node, node.kwargs))
        if is_random(node):
            self.draws[number] += 1
            return number_of(number, self.draws[number])
        return number

    def write(self, node: fx.Node) -> int:
        """Return the number of the first operand's new contents, and record it."""
        target: Any = node.args[0]
        overwrites = node.target is aten.copy_.default and ir.example(target).dtype == ir.example(node.args[1]).dtype  # type: ignore
        value = self.read(node.args[1]) if overwrites else number_of(node.target, self.signature(node, node.args))  # type: ignore
        base = base_of(target)
        part = number_of("part", self.of[target], value, self.written.get(base))
        self.written[base] = value if base is target else part
        return value

    def operand(self, node: fx.Node, operand: Any) -> int:
        """Return the number of an operand; for a view, without writes, which count when the view is read."""
        return self.of[operand] if is_view(node) and operand in self.of else self.read(operand)

    def signature(self, node: fx.Node, tree: Any) -> Any:
        """Return an operator's arguments in hashable form, with numbers for nodes; 1, 1.0 and True differ."""
        if isinstance(tree, fx.Node):
            return "%", self.operand(node, tree)
        if isinstance(tree, (tuple, list)):
            return tuple(self.signature(node, part) for part in tree)
        if isinstance(tree, dict):
            return tuple((key, self.signature(node, part)) for key, part in tree.items())
        if isinstance(tree, slice):
            return self.signature(node, ("slice", tree.start, tree.stop, tree.step))
        if isinstance(tree, str) and kind_of(node):
            return tree.partition(":")[0]  # all communicators of an axis are equal
        return type(tree), tree

    def by_algebra(self, node: fx.Node) -> int | None:
        """Return the number of an operator that algebra knows; None for others."""
        name, record = name_of(node), RESHARD_OPS.get(node.target)
        if name in KEEP or name in CASTS and self.layout(node).entries == self.layout(node.args[0]).entries:  # type: ignore
            return self.operand(node, node.args[0])
        if name in SWAPS and self.undoes(node):
            return self.of[node.args[0].args[0]]  # type: ignore[union-attr,index]
        if record is not None and record.reduces == "sum" or name == "expand":
            factor = number_of(node.target, self.signature(node, node.args[1:]))
            return self.operand(node, node.args[0]) * factor % PRIME
        if name in ARITHMETIC and node.kwargs.keys() <= {"alpha"} and self.layout(node).dtype != torch.bool:
            terms = [self.read(a) if isinstance(a, fx.Node) else rational(a) for a in node.args]
            scale = rational(argument(node, "alpha", 1))
            return None if None in terms or scale is None else ARITHMETIC[name](scale, *terms)
        return None

    def undoes(self, node: fx.Node) -> bool:
        """Return True if an operator swaps two dims that its operand, the same operator, swapped."""
        x: Any = node.args[0]
        if x.target is not node.target or x in self.followed:
            return False
        rank = len(self.layout(node).shape)
        return {d % rank for d in node.args[1:]} == {d % rank for d in x.args[1:]}  # type: ignore[operator]

    def layout(self, node: fx.Node) -> Layout:
        """Return the layout of the node's tensor."""
        value = self.avals.values[node]
        assert isinstance(value, Value)
        return value.layout


def _power(scale: int, x: int, exponent: int) -> int | None:
    return x if exponent == 1 else None


def _quotient(scale: int, x: int, y: int) -> int | None:
    return x * pow(y, -1, PRIME) % PRIME if y else None


ARITHMETIC: dict[str, Any] = {
    "add": lambda scale, x, y: (x + scale * y) % PRIME,
    "sub": lambda scale, x, y: (x - scale * y) % PRIME,
    "mul": lambda scale, x, y: x * y % PRIME,
    "div": _quotient,
    "neg": lambda scale, x: -x % PRIME,
    "pow": _power,
}


# ---- entries in a bucket -----------------------------------------------------------------------------


@dataclass
class Entry:
    """An entry of a node's value; `ranks` maps an axis to the rank that holds it, or to "all" (by default the own)."""

    node: fx.Node
    index: list[int]
    ranks: dict[str, int | str]
    operations: list[Any] = field(default_factory=list)  # casts and reductions on its path


@dataclass
class Moved:
    """A node's value that only followed nodes produced."""

    numbers: Numbers
    node: fx.Node

    def number(self) -> int:
        """Return a number that is equal for any node with the same entries."""
        shape = self.numbers.layout(self.node).shape
        return number_of(shape, tuple(self.origin(k, shape) for k in range(ENTRIES)))

    def origin(self, k: int, shape: tuple[int, ...]) -> Any:
        """Return the origin of the k-th sampled entry, and the operations applied to it."""
        if not math.prod(shape):
            return ()
        entry = Entry(self.node, [number_of(k, d, n) % n for d, n in enumerate(shape)], {})
        while entry.node in self.numbers.followed:
            current = entry.node
            if end := self.step(k, entry):
                return end
        number, stride = self.numbers.read_by[current, entry.node], self.numbers.layout(entry.node).stride
        index = tuple(i if s else 0 for i, s in zip(entry.index, stride))  # broadcast entries share memory
        return number, index, tuple(sorted(entry.ranks.items())), tuple(entry.operations)

    def step(self, k: int, entry: Entry) -> str:
        """Go from a node's entry to that of an operand; return a description if it comes from none, otherwise ""."""
        node, name = entry.node, name_of(entry.node)
        if node.target in RESHARD_OPS:
            return self.over_ranks(k, entry)
        if name == "cat":
            return self.piece(entry)
        if name in ("pad", "constant_pad_nd"):
            return self.unpadded(entry)
        entry.node = source = self.source(node)
        source_layout, layout = self.numbers.layout(source), self.numbers.layout(node)
        if self.numbers.avals.storages(node) <= self.numbers.avals.storages(source):
            at = layout.offset - source_layout.offset + sum(i * s for i, s in zip(entry.index, layout.stride))
            entry.index = index_at(at, source_layout.shape, source_layout.stride)
        elif name in COPIES:
            at = sum(i * s for i, s in zip(entry.index, contiguous_strides(layout.shape)))
            entry.index = index_at(at, source_layout.shape, contiguous_strides(source_layout.shape))
        else:
            return f"made by %{node.name}"
        entry.operations += [layout.dtype] if layout.dtype != source_layout.dtype else []
        return ""

    def source(self, node: fx.Node) -> fx.Node:
        """Return the operand that a node takes entries of; for an element of a tuple, the operand of its operator."""
        source: Any = node.args[0]
        return source if isinstance(self.numbers.avals.values[source], Value) else source.args[0]

    def over_ranks(self, k: int, entry: Entry) -> str:
        """Go through a collective."""
        record = RESHARD_OPS[entry.node.target]
        source, *arguments = entry.node.args
        a, entry.node = record.named(arguments), source  # type: ignore[assignment]
        shape, parts = self.numbers.layout(entry.node).shape, self.numbers.program.mesh[a.axis]
        if record.kind == "all_gather":
            entry.ranks[a.axis], entry.index[a.dim] = divmod(entry.index[a.dim], shape[a.dim])
            entry.operations += [a.dtype] if a.dtype != self.numbers.layout(entry.node).dtype else []
            return ""
        if record.kind == "reduce_scatter":
            rank = entry.ranks.get(a.axis, number_of(k, a.axis) % parts)
            entry.index[a.dim] += int(rank) * -(-shape[a.dim] // parts)
        entry.ranks[a.axis] = "all"
        entry.operations.append((record.reduces, a.axis, getattr(a, "dtype", None), getattr(a, "reduce_dtype", None)))
        return PADDING if record.kind == "reduce_scatter" and entry.index[a.dim] >= shape[a.dim] else ""

    def piece(self, entry: Entry) -> str:
        """Go through a concatenation."""
        parts: Any = entry.node.args[0]
        dim = argument(entry.node, "dim") % len(entry.index)
        for part in parts:
            entry.node, size = part, self.numbers.layout(part).shape[dim]
            if entry.index[dim] < size:
                return ""
            entry.index[dim] -= size
        raise AssertionError("a concatenation is as long as its parts")

    def unpadded(self, entry: Entry) -> str:
        """Go through an operator that pads."""
        source, widths = entry.node.args[:2]
        entry.node = source  # type: ignore[assignment]
        shape = self.numbers.layout(entry.node).shape
        for d, before in zip(reversed(range(len(shape))), widths[::2]):  # type: ignore[index,arg-type]
            entry.index[d] -= before
        return "" if all(0 <= i < n for i, n in zip(entry.index, shape)) else PADDING


PADDING = "padding"
COPIES = frozenset({"clone", "contiguous", "reshape", "_to_copy", "to", "_unsafe_view"})


def contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def index_at(at: int, shape: tuple[int, ...], stride: Any) -> list[int]:
    """Return the index of the entry at a memory offset; the first if several share it."""
    index = [0] * len(shape)
    for d in sorted((d for d, n in enumerate(shape) if n > 1 and stride[d]), key=lambda d: -stride[d]):
        index[d], at = divmod(at, stride[d])
    return index
