"""Assign the blocks of a batch's sequence to ranks, and measure the balance of their attention work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from passes.context.balance import assign_blocks, hops_of, pairs_by_rank, ranks_that_meet, work_of_blocks
from passes.context.sequence_layout import bounds_in
from passes.ir import ir
from passes.ir.mesh import BLOCKS
from passes.ir.mesh import SEQUENCE_AXIS as AXIS
from passes.ir.order import ZIGZAG, Order
from passes.sharding.place import samples_of


def is_for_all_samples(program: ir.Program) -> bool:
    """Return True if all ranks share a table of blocks, because they exchange data between samples."""
    return any(i.kind == "layout" and not i.spec.replicate for i in program.inputs)


def samples_read(program: ir.Program, rank: int) -> set[int]:
    """Return the numbers of a microbatch's samples that a rank reads: its own, and those that any entry gives it."""
    entries, mesh = [i for i in program.inputs if i.kind == "batch"], program.mesh
    samples = set[int]()
    for (rows, *_) in (entry.spec.dims[0] for entry in entries):
        runs = rows.runs(mesh, mesh.coordinates(rank))
        samples.update(samples_of(rank, rows.size, mesh), *(range(start, start + count) for start, _, count in runs))
        if is_for_all_samples(program):
            samples.update(range(rows.size))
    return samples


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from host memory to a GPU, the copy is asynchronous."""
    pinned = device.type == "cuda" and value.device.type == "cpu"  # others wait for earlier copies
    return (value.pin_memory() if pinned else value).to(device, non_blocking=pinned)


class BatchLayout:
    """The distribution of a batch over the ranks of a program that reads it."""

    def __init__(self, program: ir.Program, batch: Mapping[str, Tensor]):
        self.program, self.batch = program, batch
        self.orders: dict[tuple[int, ...], Order] = {}  # by the samples that they are for

    @cached_property
    def bounds(self) -> list[tuple[Tensor, Tensor]]:
        """The first key that each query sees and the key after its last one, i64[B, T] each, per attention.

        The list is empty if no document decides what attention sees.
        """
        bounds = bounds_in(self.program.bounds, self.batch) if self.program.bounds and self.batch else []
        rows = max((len(bound) for pair in bounds for bound in pair), default=0)
        return [(first.expand(rows, -1), last.expand(rows, -1)) for first, last in bounds]

    def rows(self, rank: int) -> tuple[int, ...]:
        """Return the samples for which a rank's table is made.

        These are the rank's own samples, or all if ranks exchange data between samples.
        """
        mesh, count = self.program.mesh, len(self.bounds[0][0])
        return tuple(range(count) if is_for_all_samples(self.program) else samples_of(rank, count, mesh))

    def order(self, rank: int) -> Order:
        """Return the order of the sequence, with the table that all ranks of a `cp` group share."""
        order, ranks = self.program.order, self.program.mesh[AXIS]
        if not order.table or not self.bounds:
            return order
        rows = self.rows(rank)
        if rows not in self.orders:
            work = work_of_blocks(self.keys_per_query(rows), ranks * order.chunks)
            self.orders[rows] = Order(table=assign_blocks(work, ranks))
        return self.orders[rows]

    def keys_per_query(self, rows: tuple[int, ...]) -> list[Tensor]:
        """Return the number of keys that each query of some samples sees, for each attention."""
        return [(last - first).clamp(min=0)[list(rows)] for first, last in self.bounds]

    def value(self, layout_input: ir.Input, rank: int, device: torch.device) -> Tensor:
        """Return the value of a layout input.

        It is the table of blocks, on the device, or the distance that keys travel (`hops_of`), i64[rows, P], on the
        host.
        """
        order = self.order(rank)
        if layout_input.name == BLOCKS:
            return on_device(torch.tensor(order.table), device)
        mesh, rows = self.program.mesh, list(self.rows(rank))
        meet = (ranks_that_meet(first[rows], last[rows], mesh, order) for first, last in self.bounds)
        return torch.cat([*map(hops_of, meet)])

    def work(self, rank: int) -> tuple[Tensor, ...]:
        """Return the query-key pairs of each rank of this rank's `cp` group, i64[P].

        There are two results: for the order used, and for the head-tail order.
        """
        key_counts, mesh = self.keys_per_query(self.rows(rank)), self.program.mesh
        orders = self.order(rank), ZIGZAG
        return tuple(torch.stack([pairs_by_rank(x, mesh, order) for x in key_counts]).sum(0) for order in orders)


def balance(parts: Sequence[BatchLayout], rank: int) -> dict[str, float]:
    """Return the busiest rank's attention work over the mean, summed over microbatches, as metrics.

    "cp_imbalance" is for the order used, "cp_imbalance_head_tail" for the head-tail order. The dict is empty if no
    document decides what attention sees.
    """
    if not all(part.bounds for part in parts):
        return {}
    works = zip(*(part.work(rank) for part in parts))
    ratios = [sum(int(w.max()) for w in work) / sum(float(w.double().mean()) for w in work) for work in works]
    return {"cp_imbalance": ratios[0], "cp_imbalance_head_tail": ratios[1]}
