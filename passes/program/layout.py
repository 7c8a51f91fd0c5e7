"""Where the entries of a sharded factor lie, as functions of the rank's coordinates: the same graph on every rank.

An axis cuts a factor into equal runs, one a rank, or, where the mesh folds the axis, into two a rank: chunk r and
chunk 2P-1-r of 2P, head and tail. Under a causal mask the work of every such pair is the same.

    folded, P = 2:   entries 0 1 2 3 4 5 6 7   ->   rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.program.mesh import Mesh
from passes.program.spec import Factor, share

Places = Mapping[str, Tensor]  # the rank's coordinates, 0-d int64


def entries(factor: Factor, mesh: Mesh, places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    """(index in the full factor i64[local], whether it is no padding bool[local]) of each local entry."""
    index = torch.arange(factor.local(mesh), device=device)
    valid = torch.ones_like(index, dtype=torch.bool)
    for axis, size in reversed(list(factor.shards(mesh))):
        held, place = share(size, axis, mesh), places[axis]
        if axis in mesh.folded:
            half = held // 2
            tail = index >= half
            chunk = torch.where(tail, 2 * mesh[axis] - 1 - place, place)
            index = chunk * half + index - torch.where(tail, half, 0)
        else:
            index = place * held + index
        valid = valid & (index < size)
    return index, valid


def locate(index: Tensor, factor: Factor, mesh: Mesh, places: Places) -> tuple[Tensor, Tensor]:
    """(local index, clamped into the shard; whether the rank has the entry) of each index of the full factor."""
    mine = (index >= 0) & (index < factor.size)
    for axis, size in factor.shards(mesh):
        held, place = share(size, axis, mesh), places[axis]
        if axis in mesh.folded:
            half = held // 2
            tail = index >= mesh[axis] * half
            chunk = torch.where(tail, 2 * mesh[axis] - 1 - place, place)
            index = index - chunk * half
            mine = mine & (index >= 0) & (index < half)
            index = index.clamp(0, half - 1) + torch.where(tail, half, 0)
        else:
            index = index - place * held
            mine = mine & (index >= 0) & (index < held)
    return index.clamp(0, factor.local(mesh) - 1), mine


def to_rank_order(x: Tensor, dim: int, parts: int) -> Tensor:
    """A whole dim padded with zeros, and its 2 P chunks in the order in which the ranks of a folded axis hold them."""
    missing = -x.shape[dim] % (2 * parts)
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])
    heads, tails = x.unflatten(dim, (2, parts, -1)).unbind(dim)
    return torch.stack([heads, tails.flip(dim)], dim + 1).flatten(dim, dim + 2)


def to_natural_order(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    """The inverse: `size` entries in their own order."""
    heads, tails = x.unflatten(dim, (parts, 2, -1)).unbind(dim + 1)
    return torch.stack([heads, tails.flip(dim)], dim).flatten(dim, dim + 2).narrow(dim, 0, size)
