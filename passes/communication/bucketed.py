"""Several collectives as one: their tensors are concatenated, exchanged at once and split again.

Each function takes local tensors and returns the results of separate collectives, bit for bit. A tensor is sharded
along `dims[i]`, which is moved to the front to travel; a gathered dim holds `sizes[i]` logical entries, the rest of its
last shard is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops import reshard


def gather_together(
    xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int], axis: str, axis_size: int, dtype: torch.dtype
) -> list[Tensor]:
    """Apply `all_gather` to every tensor: rank r's shards are row r of one [axis_size, entries] matrix."""
    shards = [_move(_cast(x, dtype), dim, 0) for x, dim in zip(xs, dims, strict=True)]
    flat = torch.cat([shard.reshape(-1) for shard in shards])
    rows = reshard.all_gather(flat, 0, axis, axis_size, axis_size * flat.numel(), dtype, None).view(axis_size, -1)
    pieces = rows.split([shard.numel() for shard in shards], 1)
    return [
        _move(piece.reshape(axis_size * shard.shape[0], *shard.shape[1:]).narrow(0, 0, size), 0, dim).contiguous()
        for piece, shard, size, dim in zip(pieces, shards, sizes, dims, strict=True)
    ]


def scatter_together(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    axis: str,
    axis_size: int,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Apply `reduce_scatter` to every tensor: rank r's shards are row r of one [axis_size, entries] matrix."""
    full = [_pad_rows(_move(x, dim, 0), axis_size) for x, dim in zip(xs, dims, strict=True)]
    flat = torch.cat([x.reshape(axis_size, -1) for x in full], 1).view(-1)
    local = reshard.reduce_scatter(flat, 0, axis, axis_size, dtype, reduce_dtype)
    pieces = local.split([x.numel() // axis_size for x in full])
    return [
        _move(piece.view(x.shape[0] // axis_size, *x.shape[1:]), 0, dim).contiguous()
        for piece, x, dim in zip(pieces, full, dims, strict=True)
    ]


def sum_together(xs: Sequence[Tensor], axis: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> list[Tensor]:
    """Apply `psum` to every tensor."""
    total = reshard.psum(torch.cat([x.reshape(-1) for x in xs]), axis, dtype, reduce_dtype)
    return [piece.view(x.shape) for piece, x in zip(total.split([x.numel() for x in xs]), xs, strict=True)]


def max_together(xs: Sequence[Tensor], axis: str) -> list[Tensor]:
    """Apply `pmax` to every tensor."""
    largest = reshard.pmax(torch.cat([x.reshape(-1) for x in xs]), axis)
    return [piece.view(x.shape) for piece, x in zip(largest.split([x.numel() for x in xs]), xs, strict=True)]


# Steps that change nothing add no operator to the graph.


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _move(x: Tensor, source: int, target: int) -> Tensor:
    return x if source == target else x.movedim(source, target)


def _pad_rows(x: Tensor, axis_size: int) -> Tensor:
    missing = -x.shape[0] % axis_size
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x
