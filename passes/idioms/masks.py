"""Read masks from the graph that makes them: if each query sees an interval of keys, return the interval.

    causal            i >= j                                        0 <= j < i + 1
    window            i - j < w                                     i - w < j
    documents         ids[b, i] == ids[b, j]                        first of i's run <= j < last of i's run + 1
    prefix            (i >= j) | (j < n[b])                         0 <= j < max(i + 1, n[b])
    by positions      p[b, i] >= p[b, j] within a run of p          as i >= j

and their combinations by `&`. A mask is followed in its own coordinates: its last dim counts keys, the one before it
queries, and broadcast dims have size 1. Values that do not vary along keys are left to the graph (`Row`), so the model
may compute a bound in any way. Ids describe an interval only if equal ones are adjacent: running counts always are;
inputs must be, which is checked on every batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.idioms.look_through import ARANGE, CASTS, COPIES, FULL, WIDE, number_of, see_through, span
from passes.ir import ir

aten = torch.ops.aten
KEYS, QUERIES = -1, -2
RANK = 4  # dims of a mask: batch, head, query, key

ORDER: dict[Any, Callable[[Any, Any], Any]] = {
    op: compare
    for name, compare in (("ge", operator.ge), ("gt", operator.gt), ("le", operator.le), ("lt", operator.lt))
    for op in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}
MIRRORED = {operator.ge: operator.le, operator.gt: operator.lt, operator.le: operator.ge, operator.lt: operator.gt}
EQUAL = (aten.eq.Tensor, aten.eq.Scalar)
BOTH = tuple(getattr(aten, name).Tensor for name in ("bitwise_and", "__and__")) + (aten.logical_and.default,)
EITHER = tuple(getattr(aten, name).Tensor for name in ("bitwise_or", "__or__")) + (aten.logical_or.default,)
NOT = (aten.logical_not.default, aten.bitwise_not.default)
ONES = (aten.ones.default, aten.new_ones.default, aten.ones_like.default)


@dataclass(frozen=True)
class LeafValues:
    """The values from the graph from which bounds are computed."""

    values: Mapping[fx.Node, Tensor]
    device: torch.device


class NotAnInterval(Exception):
    """Raised if a mask cannot be described by an interval; the message names the operator."""


@dataclass(frozen=True)
class Source:
    """A value under its views: dim d of `node` is dim `dims[d]` of the mask, None if its size is 1."""

    node: fx.Node
    dims: tuple[int | None, ...]

    @property
    def in_place(self) -> bool:
        """True if its dims are the mask's last dims, in order."""
        rank = len(self.dims)
        return all(at is None or at == d - rank for d, at in enumerate(self.dims))

    def align(self, leaf_values: LeafValues) -> Tensor:
        """Return the value in the mask's dims, with size 1 in dims along which it does not vary."""
        x = leaf_values.values[self.node]
        order = sorted((d for d, at in enumerate(self.dims) if at is not None), key=lambda d: self.dims[d])
        shape = [1] * RANK
        for d in order:
            shape[self.dims[d]] = x.shape[d]  # type: ignore[index]
        others = [d for d in range(x.dim()) if d not in order]
        return x.permute((*others, *order)).reshape(shape)


@dataclass(frozen=True)
class Row:
    """An integer for each query: `value(leaf_values)`, which equals `base` plus `offset` if `base` is not None.

    A base is QUERIES (the query's own position), 0 (the value is the number `offset`), or a value seen at the query.
    """

    value: Callable[[LeafValues], Any]
    base: Any = None
    offset: int = 0

    def plus(self, other: Row, sign: int = 1) -> Row:
        """Return the sum, or the difference if `sign` is -1."""
        base = self.base if other.base == 0 else other.base if self.base == 0 and sign == 1 else None
        return Row(
            lambda leaf_values: self.value(leaf_values) + sign * other.value(leaf_values),
            base,
            0 if base is None else self.offset + sign * other.offset,
        )


def number(value: int) -> Row:
    """Return a row that is the same number for all queries."""
    return Row(lambda leaf_values: value, 0, value)


@dataclass(frozen=True)
class Column:
    """`sign` times a key's position, or times a value seen at the key, plus a row."""

    base: Source | None  # None: the position itself
    row: Row
    sign: int = 1


@dataclass(frozen=True)
class Condition:
    """One condition on a key: at `row` or after it (lower), before it (upper), or in the query's run (run).

    `base` is the value that is compared, None for the key's position; for a run, the value whose equal entries form it.
    """

    kind: str  # lower | upper | run
    row: Row
    base: Source | None = None


@dataclass(frozen=True)
class Interval:
    """Keys at positions `first` <= p < `last`, None if unbounded; `itself` is True if each query sees its own key."""

    first: Row | None
    last: Row | None
    itself: bool


class Reader:
    """Reads masks of one graph; `inputs` are the batch inputs whose equal entries may be required to be adjacent."""

    def __init__(self, queries: int, keys: int, inputs: frozenset[fx.Node]):
        self.queries, self.keys, self.inputs = queries, keys, inputs
        self.leaves: dict[fx.Node, None] = {}
        self.runs: dict[fx.Node, None] = {}  # inputs whose equal entries must be adjacent

    # -- values -----------------------------------------------------------------------------------

    def below(self, node: fx.Node) -> Source:
        """Return the value under all views."""
        rank = ir.example(node).dim()
        dims: list[int | None] = [d - rank if n > 1 else None for d, n in enumerate(ir.example(node).shape)]
        while isinstance(node, fx.Node) and (step := see_through(node)) is not None:
            node, into = step
            dims = [None if at is None else dims[at] for at in into]
        return Source(node, tuple(dims))

    def leaf(self, source: Source) -> Row:
        """Return a value that does not vary along keys; the graph computes it."""
        self.leaves[source.node] = None
        if source.node.target in ARANGE:
            start, step = span(source.node)
            if source.dims == (QUERIES,) and step == 1:
                return Row(lambda leaf_values: source.align(leaf_values), QUERIES, start)
        return Row(lambda leaf_values: source.align(leaf_values).to(torch.int64), source)

    def value(self, x: Any) -> Row | Column:
        """Return an integer value as a row, or as a column if it varies along keys; raises NotAnInterval."""
        if isinstance(x, (bool, int)):
            return number(int(x))
        if not isinstance(x, fx.Node):
            raise NotAnInterval(f"the mask compares with {x!r}")
        source = self.below(x)
        node = source.node
        if not isinstance(node, fx.Node) or ir.example(node).is_floating_point():
            raise NotAnInterval(f"%{x.name} is not an integer")
        if ir.example(node).dtype in WIDE and (source.in_place or all(at is None for at in source.dims)):
            if node.target in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar):
                if node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
                    sign = 1 if "add" in node.target.name() else -1  # type: ignore[union-attr]
                    return add(self.value(node.args[0]), self.value(node.args[1]), sign)
            if node.target is aten.neg.default:
                return add(number(0), self.value(node.args[0]), -1)
        if KEYS not in source.dims:
            return self.offset_row(source)
        if node.target in ARANGE and source.dims == (KEYS,):
            start, step = span(node)
            if step == 1:
                return Column(None, number(start))
        return Column(source, number(0))

    def offset_row(self, source: Source) -> Row:
        """Return a value that does not vary along keys, as another value plus a number if it is such a sum."""
        node, sums = source.node, (aten.add.Tensor, aten.sub.Tensor)
        wide = ir.example(node).dtype in WIDE
        if wide and node.target in sums and isinstance(node.args[1], int) and not node.kwargs:
            sign = 1 if node.target is aten.add.Tensor else -1
            inner = self.below(node.args[0])  # type: ignore[arg-type]
            if len(inner.dims) == len(source.dims) and inner.in_place:
                dims = tuple(None if at is None else source.dims[d] for d, at in enumerate(inner.dims))
                return self.offset_row(Source(inner.node, dims)).plus(number(node.args[1]), sign)
        return self.leaf(source)

    # -- masks ------------------------------------------------------------------------------------

    def conditions(self, x: Any) -> list[Condition]:
        """Return the conditions on a key under which the mask lets it through; raises NotAnInterval."""
        if x is True:
            return []
        if not isinstance(x, fx.Node):
            raise NotAnInterval(f"the mask is {x!r}")
        source = self.below(x)
        node = source.node
        if constant_true(node):
            return []
        if KEYS not in source.dims:
            return [self.all_or_none(source)]
        if not source.in_place:
            raise NotAnInterval(f"%{node.name} picks keys one by one")
        args = node.args
        if combines(node, BOTH):
            return [*self.conditions(args[0]), *self.conditions(args[1])]
        if combines(node, EITHER):
            return self.union(self.interval(args[0]), self.interval(args[1]), node)
        if combines(node, NOT):
            return self.negate(args[0], node)
        if node.target in ORDER:
            return [self.inequality(ORDER[node.target], self.value(args[0]), self.value(args[1]), node)]
        if node.target in EQUAL:
            return self.equality(self.value(args[0]), self.value(args[1]), node)
        if node.target in (aten.tril.default, aten.triu.default) and source.in_place:
            return [*self.conditions(args[0]), self.triangle(node, rows=source.dims[QUERIES] is not None)]
        if node.target in CASTS and ir.example(args[0]).dtype == torch.bool:  # type: ignore[arg-type]
            return self.conditions(args[0])
        if node.target in CASTS and ir.example(node).dtype == torch.bool and (hidden := hidden_by(args[0])) is not None:
            return self.negate(hidden, node)
        raise NotAnInterval(f"%{node.name} ({node.target}) of keys does not give an interval")

    def all_or_none(self, source: Source) -> Condition:
        """Return the condition of a mask that does not vary along keys: a query sees all keys or none."""
        self.leaves[source.node] = None
        return Condition("upper", Row(lambda leaf_values: torch.where(source.align(leaf_values).bool(), self.keys, 0)))

    def triangle(self, node: fx.Node, rows: bool) -> Condition:
        """Return the condition of `tril` (j <= i + d) or `triu` (j >= i + d); i is 0 if there are no `rows` but one."""
        diagonal = node.args[1] if len(node.args) > 1 else 0
        lower = node.target is aten.tril.default
        row = self.query() if rows else number(0)
        return Condition("upper" if lower else "lower", row.plus(number(int(diagonal) + lower)))  # type: ignore

    def query(self) -> Row:
        """Return the query's own position."""
        size = self.queries

        def positions(leaf_values: LeafValues) -> Tensor:
            return torch.arange(size, device=leaf_values.device).view(1, 1, size, 1)

        return Row(positions, QUERIES, 0)

    def inequality(self, compare: Callable, left: Row | Column, right: Row | Column, node: fx.Node) -> Condition:
        """Return the condition of a comparison between a value of a key and a value of a query."""
        if isinstance(right, Column):
            left, right, compare = right, left, MIRRORED[compare]
        if not isinstance(left, Column) or isinstance(right, Column):
            raise NotAnInterval(f"%{node.name} does not compare a key with a query")
        bound = right.plus(left.row, -1)
        if left.sign < 0:
            bound, compare = add(number(0), bound, -1), MIRRORED[compare]  # type: ignore[assignment]
        shift = {operator.ge: 0, operator.gt: 1, operator.le: 1, operator.lt: 0}[compare]
        kind = "lower" if compare in (operator.ge, operator.gt) else "upper"
        return Condition(kind, bound.plus(number(shift)), left.base)

    def equality(self, left: Row | Column, right: Row | Column, node: fx.Node) -> list[Condition]:
        """Return the conditions of an equality: the key has one position, or is in the query's run."""
        if isinstance(right, Column):
            left, right = right, left
        if not isinstance(left, Column) or isinstance(right, Column):
            raise NotAnInterval(f"%{node.name} does not compare a key with a query")
        if left.base is None:
            bound = right.plus(left.row, -1)
            if left.sign < 0:
                bound = add(number(0), bound, -1)  # type: ignore[assignment]
            return [Condition("lower", bound), Condition("upper", bound.plus(number(1)))]
        at_query = tuple(QUERIES if at == KEYS else at for at in left.base.dims)
        plain = left.sign == 1 and left.row.base == 0 and left.row.offset == 0
        if not plain or right.base != Source(left.base.node, at_query) or right.offset:
            raise NotAnInterval(f"%{node.name} compares keys with another value than the same of the query")
        if left.base.dims[-1] != KEYS:
            raise NotAnInterval(f"%{node.name} does not compare along the last dim")
        self.require_adjacent(left.base.node, node)
        self.leaves[left.base.node] = None
        return [Condition("run", right, left.base)]

    def require_adjacent(self, node: fx.Node, user: fx.Node) -> None:
        """Raise NotAnInterval unless equal entries are known to be adjacent.

        An input passes, because each batch is checked.
        """
        if node in self.inputs:
            self.runs[node] = None
        elif not counts_up(node):
            raise NotAnInterval(f"%{user.name} compares %{node.name}, whose equal entries need not be adjacent")

    def negate(self, x: Any, node: fx.Node) -> list[Condition]:
        """Return the conditions of a negated mask.

        A single bound turns to its other side, an `or` to both operands negated.
        """
        below = self.below(x) if isinstance(x, fx.Node) else None
        if below is not None and below.in_place and combines(below.node, NOT):
            return self.conditions(below.node.args[0])
        if below is not None and below.in_place and combines(below.node, EITHER):
            return [condition for operand in below.node.args[:2] for condition in self.negate(operand, node)]
        conditions = self.conditions(x)
        if len(conditions) != 1 or conditions[0].kind == "run" or conditions[0].base is not None:
            raise NotAnInterval(f"%{node.name} negates more than a single bound")
        condition = conditions[0]
        return [replace(condition, kind={"lower": "upper", "upper": "lower"}[condition.kind])]

    def union(self, a: Interval, b: Interval, node: fx.Node) -> list[Condition]:
        """Return the union of two intervals that are both unbounded at the same end."""
        if a.first is None and b.first is None:
            return [Condition("upper", pick_row(torch.maximum, a.last, b.last))] if a.last and b.last else []
        if a.last is None and b.last is None:
            return [Condition("lower", pick_row(torch.minimum, a.first, b.first))] if a.first and b.first else []
        raise NotAnInterval(f"%{node.name} may see two intervals")

    def interval(self, x: Any) -> Interval:
        """Return the interval of keys that a mask lets each query see."""
        return self.intersect(self.conditions(x))

    def let_through(self, mask: fx.Node, hides: bool) -> list[Condition]:
        """Return the conditions under which a key is let through by a mask, or not hidden by it if it `hides`."""
        return self.negate(mask, mask) if hides else self.conditions(mask)

    def intersect(self, conditions: list[Condition]) -> Interval:
        """Return the interval of keys that meet all conditions."""
        runs = [condition for condition in conditions if condition.kind == "run"]
        first: Row | None = None
        last: Row | None = None
        itself = True
        for condition in conditions:
            lower: Row | None
            upper: Row | None
            if condition.kind == "run":
                lower, upper = self.run(condition.base)  # type: ignore[arg-type]
            else:
                bound = condition.row if condition.base is None else self.by_position(condition, runs)
                lower, upper = (bound, None) if condition.kind == "lower" else (None, bound)
                within = bound.offset <= 0 if condition.kind == "lower" else bound.offset >= 1
                itself = itself and bound.base == QUERIES and within
            first = lower if first is None else first if lower is None else pick_row(torch.maximum, first, lower)
            last = upper if last is None else last if upper is None else pick_row(torch.minimum, last, upper)
        return Interval(first, last, itself)

    def run(self, base: Source) -> tuple[Row, Row]:
        """Return the first position of each query's run, and the position after its last."""
        dims = tuple(QUERIES if at == KEYS else at for at in base.dims)
        bounds = [lambda x: run_ends(x)[0], lambda x: run_ends(x)[1]]

        def row(bound: Callable[[Tensor], Tensor]) -> Row:
            def value(leaf_values: LeafValues) -> Tensor:
                return Source(base.node, dims).align(
                    LeafValues({base.node: bound(leaf_values.values[base.node])}, leaf_values.device)
                )

            return Row(value)

        return row(bounds[0]), row(bounds[1])

    def by_position(self, condition: Condition, runs: list[Condition]) -> Row:
        """Return a bound on positions that restart in each run as a bound on positions in the sequence."""
        assert condition.base is not None
        for run in runs:
            if run.base is not None and counted_by(run.base.node) is not None:
                counted = self.below(counted_by(run.base.node))  # type: ignore[arg-type]
                dims = tuple(None if at is None else run.base.dims[at] for at in counted.dims)
                if counted.node is condition.base.node and dims == condition.base.dims:
                    at_query = Source(
                        condition.base.node, tuple(QUERIES if at == KEYS else at for at in condition.base.dims)
                    )
                    if condition.row.base == at_query:
                        return self.query().plus(number(condition.row.offset))
                    return condition.row.plus(self.leaf(at_query), -1).plus(self.query())
        raise NotAnInterval(f"keys are bounded by %{condition.base.node.name}, which might not count up")


def add(left: Row | Column, right: Row | Column, sign: int) -> Row | Column:
    """Return the sum or difference of two values, of which at most one varies along keys."""
    if isinstance(left, Row) and isinstance(right, Row):
        return left.plus(right, sign)
    if isinstance(left, Column) and isinstance(right, Column):
        raise NotAnInterval("two values of a key are added")
    if isinstance(left, Column):
        return replace(left, row=left.row.plus(right, sign))  # type: ignore[arg-type]
    assert isinstance(right, Column)
    row = left.plus(right.row, sign)
    return Column(right.base, row, sign * right.sign)


def pick_row(pick: Callable[[Tensor, Tensor], Tensor], a: Row, b: Row) -> Row:
    """Return the larger or the smaller of two rows, as `pick` chooses."""

    def value(leaf_values: LeafValues) -> Any:
        return pick(*(torch.as_tensor(x.value(leaf_values), device=leaf_values.device) for x in (a, b)))

    return Row(value)


def combines(node: fx.Node, operators: tuple[Any, ...]) -> bool:
    """Return True if a node is one of these operators on truth values, not a bitwise one on numbers."""
    return node.target in operators and ir.example(node).dtype == torch.bool


def hidden_by(node: Any) -> fx.Node | None:
    """Return m for `where(m, 0, x)` with a number x that is not zero in its dtype: the value cast to bool is not m."""
    while isinstance(node, fx.Node) and (node.target in COPIES or node.target is aten.expand.default):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.where.ScalarOther:
        return None
    dtype, other = ir.example(node).dtype, abs(node.args[2])  # type: ignore[arg-type]
    if other < (torch.finfo(dtype).tiny if dtype.is_floating_point else 1):
        return None
    return node.args[0] if number_of(node.args[1]) == 0 else None  # type: ignore[return-value]


def constant_true(node: fx.Node) -> bool:
    """Return True if an operator makes a mask that is True everywhere."""
    if node.target in ONES:
        return True
    return node.target in FULL and bool(node.args[-1] is True)


def counts_up(node: fx.Node) -> bool:
    """Return True if entries never decrease along the last dim: running counts, positions."""
    if node.target in ARANGE:
        return True
    if node.target is aten.cumsum.default and isinstance(node.args[0], fx.Node):
        dim, rank = int(node.args[1]), ir.example(node).dim()  # type: ignore[arg-type]
        counted = node.args[0]
        while counted.target in CASTS or counted.target in COPIES:
            counted = counted.args[0]  # type: ignore[assignment]
        wide = ir.example(node).dtype in WIDE
        return wide and dim % rank == rank - 1 and ir.example(counted).dtype == torch.bool
    return False


def counted_by(node: fx.Node) -> fx.Node | None:
    """Return p for `cumsum(diff(p) != 1)`, positions that rise by 1 within each of these runs; otherwise None."""
    if not counts_up(node) or node.target is not aten.cumsum.default:
        return None
    turn: Any = node.args[0]
    while turn.target in CASTS or turn.target in COPIES:
        turn = turn.args[0]
    if turn.target not in (aten.ne.Scalar, aten.ne.Tensor) or turn.args[1] != 1:
        return None
    rise: Any = turn.args[0]
    if not isinstance(rise, fx.Node) or rise.target is not aten.diff.default:
        return None
    x: Any = rise.args[0]
    _, order, dim, before, after = (*rise.args, *(1, -1, None, None)[len(rise.args) - 1 :])
    last = dim in (-1, ir.example(x).dim() - 1)
    one_before = before is not None and after is None and ir.example(rise).shape == ir.example(x).shape
    return x if order == 1 and last and one_before and ir.example(x).dtype in WIDE else None


def run_ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each entry's run of equal entries in the last dim, and one past its last, i64."""
    size = x.shape[-1]
    at = torch.arange(size, device=x.device).expand(x.shape)
    turns = x[..., 1:] != x[..., :-1]
    edge = torch.ones_like(x[..., :1], dtype=torch.bool)
    first = torch.where(torch.cat([edge, turns], -1), at, 0).cummax(-1).values
    last = torch.where(torch.cat([turns, edge], -1), at + 1, size).flip(-1).cummin(-1).values.flip(-1)
    return first, last
