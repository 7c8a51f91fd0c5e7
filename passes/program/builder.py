"""What rules and attention see of the partitioner: something that appends local operators to the graph of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from passes.program import ir
from passes.program.machine import Balance
from passes.program.mesh import Mesh
from passes.program.spec import Factor, Spec


class Builder(Protocol):
    """Appends local operators to a graph, computing the fake value of each as it goes.

    `coordinates` are the rank's by axis, with the block table of a sequence, `operators` the local operators
    made for this program by what makes them, `notes` lines for the pass's report, `context_method` the method of
    context parallelism asked for, `balance` what `auto` takes of the machine. Ranks with other rows may hold other
    blocks of them, unless there is `one_table` for all: something of several rows is exchanged.
    """

    mesh: Mesh
    ctx: ir.Context
    coordinates: dict[str, fx.Node]
    operators: dict[Any, Any]
    notes: list[str]
    context_method: str
    balance: Balance
    one_table: bool

    def call(self, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
        """An operator call."""

    def trace(self, fn: Callable[..., Tensor], *inputs: fx.Node) -> fx.Node:
        """The operators that `fn` calls on the nodes' values."""

    def convert(
        self, x: fx.Node, before: Spec, after: Spec, has_grad: bool = True, reduce_dtype: torch.dtype | None = None
    ) -> fx.Node:
        """The value in another placement; gradients are reduced in the dtype `reduce_dtype` (None: their own)."""

    def reshard(self, of: fx.Node, x: fx.Node, before: Spec, after: Spec, reason: str) -> fx.Node:
        """The value in another placement, noted for the report as one of a node of the global graph."""

    def at(self, factor: Factor) -> dict[str, fx.Node]:
        """Where the rank's share of a factor lies: its coordinates on the axes that shard it, and a table."""

    def row_of_hops(self, bounds: Iterable[fx.Node], inner: int) -> int | None:
        """Which row of hops, among the inputs, is of an attention with bounds and of a ring across groups of `inner`.

        None if every step is always sent.
        """

    def fill_padding(self, x: fx.Node, spec: Spec, fill: float, dims: Collection[int] | None = None) -> fx.Node:
        """The tensor with padding (along `dims`; None: all) set to `fill`; its gradient there is zero."""


Emit = Callable[[Builder, fx.Node, list[fx.Node], list[Spec], list[Spec]], fx.Node]
"""Builds the local form of an operator: (builder, node, local operands, their placements, those of the results)."""
