"""The positions of a sharded factor's entries, as functions of the rank's coordinates: one graph for every rank.

An axis cuts a factor into equal chunks, with as many on each rank as its order says (`order.py`); if the order is a
table, each batch comes with one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ir.mesh import BLOCKS, Mesh
from passes.ir.spec import Factor, Spec

Coordinates = Mapping[str, Tensor]  # the rank's, 0-d int64, and the block table of a sequence, i64[P, blocks]


def entries(factor: Factor, mesh: Mesh, coordinates: Coordinates, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (index in the full factor i64[local], False for padding bool[local]) of each local entry."""
    index = torch.arange(factor.local(mesh), device=device)
    valid = torch.ones_like(index, dtype=torch.bool)
    for axis, size in reversed(list(factor.shards(mesh))):
        share, axis_index, order = factor.share(size, axis, mesh), coordinates[axis], factor.order_over(axis)
        if order.table:
            block = share // order.chunks
            slot = (index // block).clamp(max=order.chunks - 1)  # padding of inner axes lies beyond
            number = own_blocks(coordinates, axis).index_select(0, slot)
            index = number * block + index % block
        elif order.zigzag:
            half = share // 2
            tail = index >= half
            chunk = torch.where(tail, 2 * mesh[axis] - 1 - axis_index, axis_index)
            index = chunk * half + index - torch.where(tail, half, 0)
        else:
            index = axis_index * share + index
        valid = valid & (index < size)
    return index, valid


def is_entry(spec: Spec, mesh: Mesh, coordinates: Coordinates, device: torch.device) -> Tensor:
    """Return a mask of a rank's local tensor, False for padding."""
    factors = [factor for dim in spec.dims for factor in dim]
    mask = torch.ones([1] * len(factors), dtype=torch.bool, device=device)
    for k, factor in enumerate(factors):
        valid = entries(factor, mesh, coordinates, device)[1]
        mask = mask & valid.view([-1 if j == k else 1 for j in range(len(factors))])
    return mask.reshape(spec.local_shape(mesh))


def locate(index: Tensor, factor: Factor, mesh: Mesh, coordinates: Coordinates) -> tuple[Tensor, Tensor]:
    """Return (local index, clamped into the shard; True if the rank has the entry) of each index of the full factor."""
    is_local = (index >= 0) & (index < factor.size)
    for axis, size in factor.shards(mesh):
        share, axis_index, order = factor.share(size, axis, mesh), coordinates[axis], factor.order_over(axis)
        if order.table:
            block, blocks = share // order.chunks, factor.pieces(axis, mesh)
            blocks_here, ordered = own_blocks(coordinates, axis), torch.arange(order.chunks, device=index.device)
            slots = torch.full((blocks,), -1, device=index.device).scatter(0, blocks_here, ordered)
            slot = slots[(index // block).clamp(0, blocks - 1)]
            is_local = is_local & (slot >= 0)
            index = slot.clamp(min=0) * block + index % block
        elif order.zigzag:
            half = share // 2
            tail = index >= mesh[axis] * half
            chunk = torch.where(tail, 2 * mesh[axis] - 1 - axis_index, axis_index)
            index = index - chunk * half
            is_local = is_local & (index >= 0) & (index < half)
            index = index.clamp(0, half - 1) + torch.where(tail, half, 0)
        else:
            index = index - axis_index * share
            is_local = is_local & (index >= 0) & (index < share)
    return index.clamp(0, factor.local(mesh) - 1), is_local


def own_blocks(coordinates: Coordinates, axis: str) -> Tensor:
    """Return the numbers of the blocks that the rank holds of a sequence in blocks, i64[blocks]."""
    return coordinates[BLOCKS].index_select(0, coordinates[axis].view(1)).view(-1)


def to_rank_order(x: Tensor, dim: int, parts: int, table: Tensor | None = None) -> Tensor:
    """Pad a full dim with zeros, and put its chunks into the order in which the ranks of an axis hold them.

    A zigzag has 2 P chunks; blocks are as many as the table's.
    """
    chunks = 2 * parts if table is None else table.numel()
    missing = -x.shape[dim] % chunks
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
    if table is not None:
        return x.unflatten(dim, (chunks, -1)).index_select(dim, table.flatten()).flatten(dim, dim + 1)
    heads, tails = x.unflatten(dim, (2, parts, -1)).unbind(dim)
    return torch.stack([heads, tails.flip(dim)], dim + 1).flatten(dim, dim + 2)


def to_natural_order(x: Tensor, dim: int, parts: int, size: int, table: Tensor | None = None) -> Tensor:
    """Invert `to_rank_order`: return `size` entries in their natural order."""
    if table is not None:
        order = table.flatten().argsort()
        return x.unflatten(dim, (table.numel(), -1)).index_select(dim, order).flatten(dim, dim + 1).narrow(dim, 0, size)
    heads, tails = x.unflatten(dim, (parts, 2, -1)).unbind(dim + 1)
    return torch.stack([heads, tails.flip(dim)], dim).flatten(dim, dim + 2).narrow(dim, 0, size)


def run_starts(parts: int, chunk: int, zigzag: bool, device: torch.device) -> Tensor:
    """Return the starts of the chunks that each rank of an axis holds, in a zigzag or plainly: i64[P, chunks]."""
    axis_index = torch.arange(parts, device=device)
    return torch.stack([axis_index, 2 * parts - 1 - axis_index] if zigzag else [axis_index], 1) * chunk
