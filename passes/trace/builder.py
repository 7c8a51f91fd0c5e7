"""Append local operators to the graph of a rank: the partitioner as rules and attention use it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layout import entries
from passes.ir.machine import H100, Balance
from passes.ir.mesh import SEQUENCE_AXIS, Mesh
from passes.ir.spec import Factor, Spec
from passes.ops.shift import divisors
from passes.trace.editor import Editor

aten = torch.ops.aten


class MethodChoice(NamedTuple):
    """The method of an attention over a sharded sequence, the reason for it, and a line for the report."""

    method: str
    reason: str
    note: str


class Builder(Editor, ABC):
    """Appends local operators to a new graph.

    `coordinates` are the rank's by axis, with the block table of a sequence. `operators` are the local operators made
    for this program, by their source. `context_method` is the requested method of context parallelism, `balance` the
    machine's rates for `auto`. Ranks with other rows may have other block tables, unless rows are exchanged: then all
    share `one_table`. `attentions` are the bounds whose hops are known, row by row. `masks` counts the inserted masks.
    """

    def __init__(self, mesh: Mesh, ctx: ir.Context):
        super().__init__(ctx, fx.Graph())
        self.mesh = mesh
        self.coordinates: dict[str, fx.Node] = {}
        self.masks = 0
        self.context_method = "auto"
        self.balance: Balance = H100
        self.one_table = False
        self.attentions: list[tuple[str, str]] = []
        self.operators: dict[Any, Any] = {}
        self.methods: dict[fx.Node, MethodChoice] = {}

    @abstractmethod
    def convert(
        self, x: fx.Node, before: Spec, after: Spec, has_grad: bool = True, reduce_dtype: torch.dtype | None = None
    ) -> fx.Node:
        """Return the value in another placement; gradients are reduced in `reduce_dtype` (None: their own)."""

    @abstractmethod
    def reshard(self, source: fx.Node, x: fx.Node, before: Spec, after: Spec, reason: str) -> fx.Node:
        """Return the value in another placement, reported as a reshard of the global node `source`."""

    def row_of_hops(self, bounds: Iterable[fx.Node], inner: int) -> int | None:
        """Return the row of hops of an attention with these bounds, in a ring across groups of `inner`.

        None if every step is always sent.
        """
        names, groups = tuple(bound.name for bound in bounds), divisors(self.mesh[SEQUENCE_AXIS])
        return self.attentions.index(names) * len(groups) + groups.index(inner) if names in self.attentions else None

    def at(self, factor: Factor) -> dict[str, fx.Node]:
        """Return the inputs that locate the rank's share of a factor: coordinates on its axes, and a table."""
        return {name: self.coordinates[name] for name in factor.reads()}

    def fill_padding(self, x: fx.Node, spec: Spec, fill: float, dims: Collection[int] | None = None) -> fx.Node:
        """Set padding (along `dims`; None: all) to `fill`; its gradient there is zero."""
        mask = None
        filled = range(len(spec.dims)) if dims is None else dims
        for d, dim in ((d, spec.dims[d]) for d in filled):
            inner = 1
            for factor in reversed(dim):
                if factor.padded(self.mesh):
                    valid = self._valid(factor, inner, d, dim, len(spec.dims), x)
                    mask = valid if mask is None else self.call(aten.logical_and.default, (mask, valid))
                inner *= factor.local(self.mesh)
        if mask is None:
            return x
        self.masks += 1
        fill = number(fill, ir.example(x).dtype)
        out = self.call(aten.where.ScalarOther, (mask, x, fill))
        has_other_padding = any(f.padded(self.mesh) for d, dim in enumerate(spec.dims) if d not in filled for f in dim)
        ir.set_spec(out, replace(spec, fill=None if has_other_padding and spec.fill != fill else fill))
        return out

    def _valid(self, factor: Factor, inner: int, d: int, dim: Sequence[Factor], rank: int, x: fx.Node) -> fx.Node:
        extent = 1
        for f in dim:
            extent *= f.local(self.mesh)
        device, at = ir.example(x).device, self.at(factor)

        def mask(*coordinates: Tensor) -> Tensor:
            valid = entries(factor, self.mesh, dict(zip(at, coordinates)), device)[1]
            shape = (extent // inner // factor.local(self.mesh), factor.local(self.mesh), inner)
            spread = valid.view(1, -1, 1).expand(shape).reshape(extent)
            return spread.view([extent if i == d else 1 for i in range(rank)])

        return self.trace(mask, *at.values())


def number(fill: float, dtype: torch.dtype) -> float | int | bool:
    """Return the number of the dtype that is nearest to `fill`."""
    if dtype.is_floating_point:
        return fill
    if dtype is torch.bool:
        return fill > 0  # -inf is the least: False
    return int(fill) if math.isfinite(fill) else torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min


Emit = Callable[[Builder, fx.Node, list[fx.Node], list[Spec], list[Spec]], fx.Node]
"""Builds the local form of an operator: (builder, node, local operands, their placements, those of the results)."""
