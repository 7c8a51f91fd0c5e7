"""The placement of a tensor's values on the mesh.

A dim is a product of factors, major to minor, and a factor is sharded over mesh axes in order. A shard of `n` over `p`
ranks has `ceil(n / p)` entries on every rank; the tail is padding, whose value `fill` records.

    >>> mesh = Mesh.of({"tp": 2})
    >>> rows = Spec(((Factor(5, ("tp",)),), (Factor(4),)))
    >>> print(rows, rows.local_shape(mesh))
    [5@tp, 4] (3, 4)
    >>> [shard(torch.arange(5), Spec(rows.dims[:1]), mesh, rank).tolist() for rank in mesh]
    [[0, 1, 2], [3, 4, 0]]
    >>> flattened = Spec(((Factor(2), Factor(6, ("tp",))),))  # [batch, sequence] as one dim, its sequence on tp
    >>> print(flattened, flattened.local_shape(mesh))
    [2*6@tp] (6,)

On an axis that shards none of its factors a tensor is
- partial: the ranks hold terms of a sum (or max);
- replicate: a full copy whose uses differ by rank, so that its gradient is partial;
- invariant: the same value, used the same way, on every rank, as is its gradient.

The terms are those of spmd_types; JAX calls replicate `reduced` and its gradient `unreduced`.

    >>> print(Spec(((Factor(4),),), partial=(("tp", "sum"),)).gradient())
    [4] replicate(tp)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from passes.ir.mesh import BLOCKS, FLATTENED, SEQUENCE_AXIS, Mesh
from passes.ir.order import PLAIN, Order

REDUCTIONS = {"sum": torch.add, "max": torch.maximum}  # of partial values, by name


@dataclass(frozen=True)
class Factor:
    """`size` logical entries split over `axes` in order; `label` is their meaning (batch, sequence).

    `order` says which chunks the ranks of `cp` hold; in one program it is the same for all that `cp` shards.
    """

    size: int
    axes: tuple[str, ...] = ()
    label: str = field(default="", compare=False)
    order: Order = field(default=PLAIN, compare=False)

    def order_over(self, axis: str) -> Order:
        """Return the order of the chunks on an axis."""
        return self.order if axis == SEQUENCE_AXIS else PLAIN

    def pieces(self, axis: str, mesh: Mesh) -> int:
        """Return the number of equal chunks into which an axis cuts it."""
        return mesh[axis] * self.order_over(axis).chunks

    def share(self, size: int, axis: str, mesh: Mesh) -> int:
        """Return the entries on each rank if an axis shards `size` of its entries, padding included."""
        return -(-size // self.pieces(axis, mesh)) * self.order_over(axis).chunks

    def reads(self) -> tuple[str, ...]:
        """Return the program inputs that locate a rank's share of it."""
        return (*self.axes, *([BLOCKS] if SEQUENCE_AXIS in self.axes and self.order.table else []))

    def shards(self, mesh: Mesh) -> Iterator[tuple[str, int]]:
        """Yield (axis, size before the split), outermost first."""
        size = self.size
        for axis in self.axes:
            yield axis, size
            size = self.share(size, axis, mesh)

    def local(self, mesh: Mesh) -> int:
        """Return the entries on each rank, padding included."""
        size = self.size
        for axis in self.axes:
            size = self.share(size, axis, mesh)
        return size

    def padded(self, mesh: Mesh) -> bool:
        """Return True if some rank holds entries beyond the logical end."""
        return any(size % self.pieces(axis, mesh) for axis, size in self.shards(mesh))

    def runs(self, mesh: Mesh, coordinates: dict[str, int]) -> list[tuple[int, int, int]]:
        """Return (first logical index, first local index, length) of the rank's runs of valid entries."""
        runs = [(0, 0, self.size)]
        for axis, size in self.shards(mesh):
            chunk, local = -(-size // self.pieces(axis, mesh)), 0
            cut = []
            for number in self.order_over(axis).chunks_of(coordinates[axis], mesh[axis]):
                for start, at, length in runs:
                    first, last = max(at, number * chunk), min(at + length, (number + 1) * chunk)
                    if first < last:
                        cut.append((start + first - at, local + first - number * chunk, last - first))
                local += chunk
            runs = cut
        return runs

    def __str__(self) -> str:
        return f"{self.size}@{'@'.join(self.axes)}" if self.axes else str(self.size)


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Spec:
    """The placement of one tensor: its dims, the axes it is partial on (and how), the axes it is replicate on."""

    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, str], ...] = ()  # (axis, "sum" | "max")
    replicate: tuple[str, ...] = ()
    fill: float | None = field(default=None, compare=False)  # padding value; None: any finite one

    @staticmethod
    def whole(shape: Sequence[int], labels: Sequence[str] = ()) -> Spec:
        """Return the placement of a full, invariant copy of the given logical shape."""
        names = [*labels, *[""] * len(shape)]
        return Spec(tuple((Factor(int(size), (), name),) for size, name in zip(shape, names)), fill=0.0)

    def ordered(self, order: Order) -> Spec:
        """Return the placement with the order in which `cp` holds its chunks."""
        return replace(self, dims=tuple(tuple(replace(f, order=order) for f in dim) for dim in self.dims))

    @property
    def order(self) -> Order:
        """The order in which `cp` holds its chunks, or would."""
        return next((f.order for dim in self.dims for f in dim if not f.order.is_plain), PLAIN)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape on each rank, padding included."""
        return tuple(math.prod(f.local(mesh) for f in dim) for dim in self.dims)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The axes that shard some factor; joined axes under their joined name."""
        return tuple(axis for dim in self.dims for f in dim for axis in f.axes)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes on which the value has yet to be reduced."""
        return tuple(axis for axis, _ in self.partial)

    def state(self, axis: str) -> str:
        """Return the tensor's state on one axis of the mesh: `shard`, `partial`, `replicate` or `invariant`."""
        if any(axis in FLATTENED.get(name, (name,)) for name in self.sharded):
            return "shard"
        if axis in self.partial_axes:
            return "partial"
        return "replicate" if axis in self.replicate else "invariant"

    def padded(self, mesh: Mesh) -> bool:
        """Return True if any rank holds padding."""
        return any(f.padded(mesh) for dim in self.dims for f in dim)

    def gradient(self) -> Spec:
        """Return the placement of the gradient: sums become replicate, replicate becomes a sum."""
        return replace(self, partial=tuple((axis, "sum") for axis in self.replicate), replicate=self.partial_axes)

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, dim)) or "1" for dim in self.dims)
        kinds = [f"{how}({axis})" for axis, how in self.partial] + [f"replicate({axis})" for axis in self.replicate]
        return " ".join([f"[{dims}]", *kinds])


@dataclass(frozen=True)
class Box:
    """A rectangle of one rank's valid entries: offsets in the full and in the local tensor, and its size."""

    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, full: Tensor | Stored) -> Tensor:
        """Return the rectangle's entries in the full tensor: a view, if it is in memory."""
        return full[tuple(slice(o, o + n) for o, n in zip(self.offset, self.size))]

    def of_local(self, local: Tensor) -> Tensor:
        """Return the rectangle's entries in the local tensor, a view."""
        return local[tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.size))]


def _segments(dim: Dim, mesh: Mesh, coordinates: dict[str, int]) -> list[tuple[int, int, int]]:
    """Return (full start, local start, length) of a dim's runs of valid entries."""
    if not dim:
        return [(0, 0, 1)]
    (head, *tail) = dim
    runs = head.runs(mesh, coordinates)
    inner, inner_local = math.prod(f.size for f in tail), math.prod(f.local(mesh) for f in tail)
    if not any(f.axes for f in tail):
        return [(start * inner, at * inner, length * inner) for start, at, length in runs]
    inner_runs = _segments(tuple(tail), mesh, coordinates)
    return [
        ((start + i) * inner + s, (at + i) * inner_local + ls, n)
        for start, at, length in runs
        for i in range(length)
        for s, ls, n in inner_runs
    ]


def boxes(spec: Spec, mesh: Mesh, coordinates: dict[str, int]) -> list[Box]:
    """Return the rectangles of the full tensor that the rank at `coordinates` owns (none if it owns only padding)."""
    runs = [_segments(dim, mesh, coordinates) for dim in spec.dims]
    return [
        Box(*map(tuple, zip(*combination))) if combination else Box((), (), ())
        for combination in itertools.product(*runs)
    ]


class Stored(Protocol):
    """A full tensor that need not be in memory: slices of it are read on demand."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


Value = Tensor | Stored


def shard(
    full: Value,
    spec: Spec,
    mesh: Mesh,
    coordinates: dict[str, int],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the local tensor of the rank at `coordinates`, a copy of `dtype` on `device`.

    They default to the full tensor's dtype, and to its device or the CPU. Padding holds `spec.fill` (zero if None). Of
    a stored tensor, only the rank's entries are read.
    """
    if tuple(full.shape) != spec.shape:
        raise ValueError(f"tensor is {tuple(full.shape)}, its spec {spec} is of shape {spec.shape}")
    if device is None and isinstance(full, Tensor):
        device = full.device
    local = torch.full(spec.local_shape(mesh), spec.fill or 0, dtype=dtype or full.dtype, device=device)
    for box in boxes(spec, mesh, coordinates):
        box.of_local(local).copy_(box.of(full))
    return local


def unshard(locals_by_rank: Sequence[Tensor], spec: Spec, mesh: Mesh) -> Tensor:
    """Return the full tensor from every rank's local one; partial values are reduced, copies taken from one rank."""
    full = locals_by_rank[0].new_zeros(spec.shape)
    owners = {axis: 0 for axis in mesh.axes if spec.state(axis) in ("invariant", "replicate")}
    written: set[tuple[int, ...]] = set()
    for coordinates, local in zip(mesh, locals_by_rank, strict=True):
        if any(coordinates[axis] != owner for axis, owner in owners.items()):
            continue
        for box in boxes(spec, mesh, coordinates):
            into, part = box.of(full), box.of_local(local)
            if box.offset not in written:
                into.copy_(part)
            else:
                into.copy_(REDUCTIONS[dict(spec.partial)[spec.partial_axes[0]]](into, part))
            written.add(box.offset)
    return full


def validate(spec: Spec, mesh: Mesh) -> None:
    """Raise ValueError if an axis is unknown or used twice, or if a partial value is reduced in an unknown way."""
    if unknown := {reduction for _, reduction in spec.partial} - set(REDUCTIONS):
        raise ValueError(f"spec {spec} has the unknown reduction {min(unknown)!r}; known are {', '.join(REDUCTIONS)}")
    for axis in spec.sharded:
        if axis not in mesh.names:
            raise ValueError(f"spec {spec} uses axis {axis!r}, which the mesh {mesh.sizes} lacks")
    used = [*(a for axis in spec.sharded for a in mesh.over(axis)), *spec.partial_axes, *spec.replicate]
    for axis in used:
        if axis not in mesh.axes:
            raise ValueError(f"spec {spec} uses axis {axis!r}, which the mesh {mesh.sizes} lacks")
        if used.count(axis) > 1:
            raise ValueError(f"spec {spec} uses axis {axis!r} twice")
