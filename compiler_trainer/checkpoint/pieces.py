"""Rectangles of tensors: what a rank holds, which of it that rank writes, and whether some of them make a whole."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from passes.program.mesh import Mesh
from passes.program.spec import Box, Spec, boxes

PIECE_BYTES = 16 << 20  # what is read of a tensor is read in such pieces
MOST_CELLS = 1 << 24
Placed = Mapping[str, tuple[Spec, Mapping[int, Tensor]]]
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the full tensor, and size


class Stateful(Protocol):
    """What a checkpoint is made of: the ranks that live in this process, and their local tensors."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def tensors(self) -> dict[str, tuple[Spec, dict[int, Tensor]]]: ...


def state_of(step: Stateful) -> Placed:
    """The state of this process by name; a tensor without entries has nothing to store."""
    state = {name: placed for name, placed in step.tensors().items() if math.prod(placed[0].shape)}
    for name, (spec, _) in state.items():
        if spec.partial:
            raise ValueError(f"a partial sum is not state: {name}, {spec}")
    return state


def written_by(rank: int, state: Placed, mesh: Mesh) -> Iterator[tuple[str, Box]]:
    """The pieces that a rank writes: of copies on several ranks one is written, all of them writing about as much.

    Copies are on ranks that differ on axes that shard nothing, and these hold the same pieces of all tensors that have
    these axes in common. So each knows what the others write.
    """
    place = mesh.coordinates(rank)
    bytes_by_axes: dict[tuple[str, ...], list[int]] = {}
    for name, (spec, local) in state.items():
        axes = tuple(axis for axis in mesh.axes if spec.state(axis) != "shard")
        sizes = [mesh[axis] for axis in axes]
        loads = bytes_by_axes.setdefault(axes, [0] * math.prod(sizes))
        mine = int(np.ravel_multi_index([place[axis] for axis in axes], sizes)) if axes else 0
        itemsize = local[rank].dtype.itemsize
        for piece in (p for box in boxes(spec, mesh, place) for p in cut(box, itemsize)):
            writer = loads.index(min(loads))
            loads[writer] += math.prod(piece.size) * itemsize
            if writer == mine:
                yield name, piece


def cut(box: Box, itemsize: int) -> Iterator[Box]:
    """A rectangle along its longest dim, in pieces of `PIECE_BYTES` where its rows are not longer than that."""
    if not box.size:
        yield box
        return
    longest = max(box.size)
    dim = box.size.index(longest)
    rows = max(1, PIECE_BYTES * longest // (math.prod(box.size) * itemsize))
    for first in range(0, longest, rows):
        size = (*box.size[:dim], min(rows, longest - first), *box.size[dim + 1 :])
        yield Box(moved(box.offset, dim, first), moved(box.local_offset, dim, first), size)


def moved(offset: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    """An offset further along a dim."""
    return (*offset[:dim], offset[dim] + by, *offset[dim + 1 :])


def overlap(piece: Rectangle, box: Rectangle) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two rectangles have in common, as slices of the one and of the other; None if that is nothing."""
    in_piece, in_box = [], []
    for p, n, b, m in zip(*piece, *box, strict=True):
        first, last = max(p, b), min(p + n, b + m)
        if first >= last:
            return None
        in_piece.append(slice(first - p, last - p))
        in_box.append(slice(first - b, last - b))
    return tuple(in_piece), tuple(in_box)


def what_is_wrong(shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str:
    """Why rectangles inside a tensor do not make it up, each entry once; empty if they do."""
    found = list(rectangles)
    edges = [sorted({0, n, *(e for o, s in found for e in (o[d], o[d] + s[d]))}) for d, n in enumerate(shape)]
    cells = [len(of_dim) - 1 for of_dim in edges]
    if math.prod(cells) > MOST_CELLS:
        return f"is in {len(found)} pieces of too many different edges"
    taken = np.zeros(cells, bool)
    for offset, size in found:
        where = tuple(
            slice(bisect.bisect_left(e, o), bisect.bisect_left(e, o + n)) for e, o, n in zip(edges, offset, size)
        )
        if taken[where].any():
            return f"has two pieces that overlap, one at {list(offset)}"
        taken[where] = True
    if taken.all():
        return ""
    lacking = [e[int(at)] for e, at in zip(edges, np.argwhere(~taken)[0])]
    return f"lacks a piece at {lacking}"
