"""Rectangles of tensors: the parts that ranks hold, the rank that writes each, and a check of completeness."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from passes.ir.mesh import Mesh
from passes.ir.spec import Box, Spec, boxes

PIECE_BYTES = 16 << 20  # tensors are read in pieces of this size
MOST_CELLS = 1 << 24
Placed = Mapping[str, tuple[Spec, Mapping[int, Tensor]]]
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the full tensor, and size


class Stateful(Protocol):
    """The interface of a checkpoint's source: the ranks of this process, and their local tensors."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def tensors(self) -> dict[str, tuple[Spec, dict[int, Tensor]]]: ...


def state_of(step: Stateful) -> Placed:
    """Return the state of this process by name, without empty tensors."""
    state = {name: placed for name, placed in step.tensors().items() if math.prod(placed[0].shape)}
    for name, (spec, _) in state.items():
        if spec.partial:
            raise ValueError(f"a partial sum is not state: {name}, {spec}")
    return state


def written_by(rank: int, state: Placed, mesh: Mesh) -> Iterator[tuple[str, Box]]:
    """Yield the pieces that a rank writes; one copy of each is written, and all ranks write about as much.

    Copies are on ranks that differ only on axes that shard nothing. These ranks hold the same pieces of all tensors
    with these axes, so each of them knows which ones the others write.
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
    """Yield a rectangle in pieces along its longest dim, of at most `PIECE_BYTES` unless one row is larger."""
    if not box.size:
        yield box
        return
    longest = max(box.size)
    dim = box.size.index(longest)
    rows = max(1, PIECE_BYTES * longest // (math.prod(box.size) * itemsize))
    for first in range(0, longest, rows):
        size = (*box.size[:dim], min(rows, longest - first), *box.size[dim + 1 :])
        yield Box(shift_offset(box.offset, dim, first), shift_offset(box.local_offset, dim, first), size)


def shift_offset(offset: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    """Return an offset moved along a dim."""
    return (*offset[:dim], offset[dim] + by, *offset[dim + 1 :])


def overlap(piece: Rectangle, box: Rectangle) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two rectangles, as slices of the first and of the second; None if there is none."""
    piece_slices, box_slices = [], []
    for p, n, b, m in zip(*piece, *box, strict=True):
        first, last = max(p, b), min(p + n, b + m)
        if first >= last:
            return None
        piece_slices.append(slice(first - p, last - p))
        box_slices.append(slice(first - b, last - b))
    return tuple(piece_slices), tuple(box_slices)


def what_is_wrong(shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str:
    """Return why rectangles do not cover a tensor exactly once, or an empty string if they do."""
    rectangle_list = list(rectangles)
    edges = [sorted({0, n, *(e for o, s in rectangle_list for e in (o[d], o[d] + s[d]))}) for d, n in enumerate(shape)]
    cells = [len(edge_list) - 1 for edge_list in edges]
    if math.prod(cells) > MOST_CELLS:
        return f"is in {len(rectangle_list)} pieces with too many different edges"
    covered = np.zeros(cells, bool)
    for offset, size in rectangle_list:
        region = tuple(
            slice(bisect.bisect_left(e, o), bisect.bisect_left(e, o + n)) for e, o, n in zip(edges, offset, size)
        )
        if covered[region].any():
            return f"has two pieces that overlap, one at {list(offset)}"
        covered[region] = True
    if covered.all():
        return ""
    position = [e[int(at)] for e, at in zip(edges, np.argwhere(~covered)[0])]
    return f"lacks a piece at {position}"
