"""Reshard: the operators that take a local tensor from one placement to another.

    [5, 4] sum(tp)     ->  [5@tp, 4]              reduce_scatter
    [5@tp, 4]          ->  [5, 4@tp]              all_to_all
    [5@tp, 4]          ->  [5, 4] replicate(tp)   all_gather
    [5@tp, 4]          ->  [5, 4]                 all_gather_invariant
    [5, 4]             ->  [5@tp, 4]              invariant_to_shard
    [5, 4]             ->  [5, 4] replicate(tp)   invariant_to_replicate

A conversion of several axes handles one axis at a time, in this order: reduce sums, then shard copies, then gather or
exchange shards, from the innermost axis outwards. A gathered dim may have to be sharded again on another axis, so
copies are sharded once more at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ir.layout import to_natural_order, to_rank_order
from passes.ir.mesh import BATCH_AXES, BLOCKS
from passes.ir.order import PLAIN, Order
from passes.ir.spec import Dim, Factor, Spec
from passes.ops import reshard
from passes.sharding.atoms import common_sizes, merge_dim, split_dim
from passes.trace.builder import Builder

aten = torch.ops.aten


def convert(
    builder: Builder, value: fx.Node, before: Spec, after: Spec, has_grad: bool, reduce_dtype: torch.dtype | None
) -> fx.Node:
    """Convert a local value from `before` to `after`; its gradient is reduced in `reduce_dtype` (None: its own)."""
    if (before.dims, before.partial) == (after.dims, after.partial) and not ir.may_have_gradient(value):
        return value
    order = next((spec.order for spec in (before, after) if not spec.order.is_plain), PLAIN)
    before, after = before.ordered(order), after.ordered(order)
    steps = _Steps(builder, value, before, has_grad, reduce_dtype)
    target = steps.align(after)
    steps.reduce(target)
    steps.make_replicate(target)
    steps.cut(target)
    steps.gather(target)
    steps.cut(target)
    steps.make_replicate(target)
    steps.make_invariant(target)
    steps.make_partial(target)
    return steps.finish(after)


class _Steps:
    """A value with each factor as a dim of its own, converted one axis at a time."""

    def __init__(
        self, builder: Builder, value: fx.Node, before: Spec, has_grad: bool, reduce_dtype: torch.dtype | None
    ):
        self.builder, self.mesh, self.value, self.reduce_dtype = builder, builder.mesh, value, reduce_dtype
        self.has_grad = has_grad and ir.may_have_gradient(value)
        self.fill = before.fill
        self.groups: list[list[Factor]] = [list(dim) for dim in before.dims]
        self.partial, self.replicate = dict(before.partial), set(before.replicate)
        self.original = value
        self.cast: torch.dtype | None = None  # a cast that is still to be applied

    # -- dims as factors ----------------------------------------------------------------------------

    def align(self, after: Spec) -> dict[str, Any]:
        """Split both placements into common factors; gather a dim first if a shard would be cut."""
        target_groups: list[list[Factor]] = []
        for d, (source_dim, target_dim) in enumerate(zip(list(self.groups), after.dims)):
            plain = [merge_dim((replace(f, label="") for f in dim), self.mesh) for dim in (source_dim, target_dim)]
            pair = self.common(*plain)
            if pair is None:
                self.groups[d] = list(plain[0])
                self.gather_dim(d)
                pair = self.common(merge_dim(self.groups[d], self.mesh), plain[1])
                assert pair is not None
            self.groups[d], want = list(pair[0]), list(pair[1])
            target_groups.append(want)
        self.spread_dims()
        flat = [f for group in target_groups for f in group]
        index = {axis: (k, i) for k, f in enumerate(flat) for i, axis in enumerate(f.axes)}
        return {"factors": flat, "index": index, "replicate": set(after.replicate), "partial": dict(after.partial)}

    def common(self, source_dim: Dim, target_dim: Dim) -> tuple[Dim, Dim] | None:
        """Return both dims over common factors, or None if a shard would be cut."""
        a, b = ([f for f in dim if f.size > 1 or f.axes] for dim in (source_dim, target_dim))
        sizes = common_sizes([f.size for f in a], [f.size for f in b]) if a and b else []
        if sizes is None:
            return None
        if not sizes:  # a dim of one entry, which an axis may still shard
            return tuple(a[:1]) or (Factor(1),), tuple(b[:1]) or (Factor(1),)
        left, right = split_dim(tuple(a), sizes, self.mesh), split_dim(tuple(b), sizes, self.mesh)
        return None if left is None or right is None else (left, right)

    def gather_dim(self, d: int) -> None:
        """Gather a dim on all its axes, before factors become dims of their own."""
        start = sum(len(g) for g in self.groups[:d])
        self.spread_dims()
        for k in range(start, start + len(self.groups[d])):
            while self.flat[k].axes:
                self.gather_last(k, invariant=True)
        self.fold_dims()
        full_size = math.prod(f.size for f in self.groups[d])
        self.groups[d] = [replace(self.groups[d][0], size=full_size, axes=())]

    def spread_dims(self) -> None:
        """View the value with one dim for each factor."""
        shape = [f.local(self.mesh) for group in self.groups for f in group]
        if len(shape) != ir.example(self.value).dim():
            self.value = self.builder.call(aten.reshape.default, (self.value, shape))

    def fold_dims(self) -> None:
        """View the value with its factors multiplied back into dims."""
        shape = [math.prod(f.local(self.mesh) for f in group) for group in self.groups]
        if len(shape) != ir.example(self.value).dim():
            self.value = self.builder.call(aten.reshape.default, (self.value, shape))

    @property
    def flat(self) -> list[Factor]:
        """All factors, one for each dim of the spread value."""
        return [f for group in self.groups for f in group]

    def set_axes(self, k: int, axes: tuple[str, ...]) -> None:
        """Record the axes that shard factor `k` now."""
        for group in self.groups:
            if k < len(group):
                group[k] = replace(group[k], axes=axes)
                return
            k -= len(group)

    # -- one kind of step each ------------------------------------------------------------------------

    def reduce(self, target: dict[str, Any]) -> None:
        """Complete partial sums: into a shard if one is wanted, otherwise into a full copy."""
        dtype = ir.example(self.value).dtype
        for axis, reduction in self.reductions(target):
            k, i = target["index"].get(axis, (0, -1))
            if reduction == "max":
                self.call(reshard.pmax, axis, axis)
            elif i >= 0 and self.flat[k].axes == target["factors"][k].axes[:i]:
                self.to_ranks(k, axis)
                self.call(reshard.reduce_scatter, axis, k, axis, self.mesh[axis], dtype, None)
                self.pad_with(0.0, k, axis)
            else:
                self.call(reshard.psum, axis, axis, dtype, None)
            for mesh_axis in self.mesh.over(axis):
                del self.partial[mesh_axis]

    def reductions(self, target: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (axis, sum or max) to reduce: first into wanted shards, then the other axes, joined if possible."""
        pending = {axis: reduction for axis, reduction in self.partial.items() if axis not in target["partial"]}
        into_shards = [axis for axis in pending if axis in target["index"]]
        yield from ((axis, pending.pop(axis)) for axis in into_shards)
        for reduction in dict.fromkeys(pending.values()):
            yield from ((axis, reduction) for axis in self.mesh.flatten(a for a in pending if pending[a] == reduction))

    def make_replicate(self, target: dict[str, Any]) -> None:
        """Mark copies as replicate on the axes on which the target is."""
        self.make_replicate_on(a for a in self.mesh.axes if a in target["replicate"] and self.state(a) == "invariant")

    def make_replicate_on(self, axes: Iterable[str]) -> None:
        """Mark a value that is invariant on the axes as replicate there."""
        for axis in self.mesh.flatten(axes):
            if self.has_grad:
                if self.reduce_dtype is not None and self.is_cast:
                    self.value, self.cast = self.before_cast()
                self.call(reshard.invariant_to_replicate, axis, axis, self.reduce_dtype)
            self.replicate.update(self.mesh.over(axis))

    def state(self, axis: str) -> str:
        """Return the value's current state on a mesh axis: shard, partial, replicate or invariant."""
        if any(axis in self.mesh.over(a) for f in self.flat for a in f.axes):
            return "shard"
        return "partial" if axis in self.partial else "replicate" if axis in self.replicate else "invariant"

    def cut(self, target: dict[str, Any]) -> None:
        """Keep this rank's share of a full copy if a shard is wanted."""
        for k, want in enumerate(target["factors"]):
            for i, axis in enumerate(want.axes):
                over = self.mesh.over(axis)
                states = {self.state(a) for a in over}
                if not states <= {"invariant", "replicate"} or self.flat[k].axes != want.axes[:i]:
                    continue
                if len(states) > 1:
                    self.make_replicate_on(a for a in over if self.state(a) == "invariant")
                self.to_ranks(k, axis)
                differs = "replicate" in states and self.has_grad
                op = reshard.replicate_to_shard if differs else reshard.invariant_to_shard
                self.call(op, axis, self.builder.coordinates[axis], k, axis, self.mesh[axis])
                self.replicate.difference_update(over)
                self.pad_with(0.0, k, axis)

    def pad_with(self, fill: float, k: int, axis: str) -> None:
        """Record that factor `k` was cut on the axis, with new padding that holds `fill`."""
        before, was_padded = self.flat[k], any(f.padded(self.mesh) for f in self.flat)
        self.set_axes(k, (*before.axes, axis))
        if before.local(self.mesh) % before.pieces(axis, self.mesh) and self.fill != fill:
            self.fill = None if was_padded else fill

    def gather(self, target: dict[str, Any]) -> None:
        """Gather unwanted shards, innermost first, or move them to another dim that wants them."""
        for k, want in enumerate(target["factors"]):
            keep = _common_prefix(self.flat[k].axes, want.axes)
            while len(self.flat[k].axes) > keep:
                axis = self.flat[k].axes[-1]
                j, i = target["index"].get(axis, (k, -1))
                if j != k and self.flat[j].axes == target["factors"][j].axes[:i]:
                    self.move_last(k, j)
                else:
                    self.gather_last(k, invariant=target["replicate"].isdisjoint(self.mesh.over(axis)))

    def gather_last(self, k: int, invariant: bool) -> None:
        """Gather factor `k` over its innermost axis: the result is `invariant`, or replicate, on all of that axis."""
        factor = self.flat[k]
        axis = factor.axes[-1]
        size = replace(factor, axes=factor.axes[:-1]).local(self.mesh)
        axis_size = self.mesh[axis]
        length = size if factor.order_over(axis).is_plain else axis_size * factor.local(self.mesh)
        if invariant:
            self.call(reshard.all_gather_invariant, axis, self.builder.coordinates[axis], k, axis, axis_size, length)
        else:
            self.value, dtype = self.before_cast()
            self.call(reshard.all_gather, axis, k, axis, axis_size, length, dtype, self.reduce_dtype)
            self.replicate.update(self.mesh.over(axis))
        self.from_ranks(k, axis, size)
        self.set_axes(k, factor.axes[:-1])

    @property
    def is_cast(self) -> bool:
        """Return True if the value is unconverted so far and is only a dtype cast of another."""
        is_cast = self.value is self.original and self.value.target is aten._to_copy.default
        return is_cast and self.has_grad and set(self.value.kwargs) <= {"dtype"}

    def before_cast(self) -> tuple[fx.Node, torch.dtype]:
        """Return (value to exchange, dtype to cast it to afterwards), so that a cast's gradient is reduced uncast."""
        dtype, self.cast = self.cast or ir.example(self.value).dtype, None
        return (self.value.args[0], dtype) if self.is_cast else (self.value, dtype)  # type: ignore[return-value]

    def to_ranks(self, k: int, axis: str) -> None:
        """Put factor `k`, full on an axis, into the order in which the axis's ranks hold it."""
        if not (order := self.flat[k].order_over(axis)).is_plain:
            self.value = self.builder.trace(
                lambda x, *table: to_rank_order(x, k, self.mesh[axis], *table), self.value, *self.table(order)
            )

    def from_ranks(self, k: int, axis: str, size: int) -> None:
        """Put factor `k`, gathered over an axis, into its natural order."""
        if not (order := self.flat[k].order_over(axis)).is_plain:
            self.value = self.builder.trace(
                lambda x, *table: to_natural_order(x, k, self.mesh[axis], size, *table), self.value, *self.table(order)
            )

    def table(self, order: Order) -> list[fx.Node]:
        return [self.builder.coordinates[BLOCKS]] if order.table else []

    def call(self, op: Any, axis: str, *args: Any) -> None:
        """Exchange the value over an axis; ranks with different rows must then share one block table."""
        by_table = any(f.order_over(a).table for f in self.flat for a in f.axes)
        if not set(BATCH_AXES).isdisjoint(self.mesh.over(axis)) and by_table:
            self.builder.one_table = True
        self.value = self.builder.call(op, (self.value, *args))

    def move_last(self, k: int, j: int) -> None:
        """Move the innermost axis of factor `k` to factor `j` in one all-to-all."""
        factor = self.flat[k]
        axis = factor.axes[-1]
        size = replace(factor, axes=factor.axes[:-1]).local(self.mesh)
        self.to_ranks(j, axis)
        length = size if factor.order_over(axis).is_plain else self.mesh[axis] * factor.local(self.mesh)
        self.call(reshard.all_to_all, axis, j, k, length, axis, self.mesh[axis])
        self.from_ranks(k, axis, size)
        self.set_axes(k, factor.axes[:-1])
        self.pad_with(0.0, j, axis)

    def make_invariant(self, target: dict[str, Any]) -> None:
        """Mark replicate copies as invariant if the target is not replicate there."""
        for axis in sorted(self.replicate - target["replicate"]):
            if self.state(axis) == "replicate":
                if self.has_grad or self.value is not self.original:  # `fsdp` may be wanted in both states
                    self.call(reshard.replicate_to_invariant, axis, self.builder.coordinates[axis], axis)
                self.replicate.discard(axis)

    def make_partial(self, target: dict[str, Any]) -> None:
        """Turn a copy into terms of a sum if the target is partial: the value on the first rank, elsewhere zeros."""
        for axis in target["partial"]:
            if axis not in self.partial:
                self.call(reshard.invariant_to_partial, axis, self.builder.coordinates[axis], axis)
                self.partial[axis] = "sum"

    def finish(self, after: Spec) -> fx.Node:
        """Fold the factors back into dims and record the placement."""
        self.fold_dims()
        if self.cast is not None:
            self.value = self.builder.trace(lambda x, dtype=self.cast: x.to(dtype), self.value)
        if self.value is not self.original:
            ir.set_spec(self.value, replace(after, fill=self.fill))
        return self.value


def _common_prefix(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
