"""A mesh of ranks with named axes: the coordinates of each rank, and the groups that communicate.

    >>> mesh = Mesh.of({"dp_shard": 2, "tp": 2})
    >>> mesh.world_size, mesh.coordinates(3)
    (4, {'dp_shard': 1, 'tp': 1})
    >>> mesh.groups("tp"), mesh.groups("dp_shard")
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])

An axis has sub-axes: adjacent ranks, or ranks with the same position among adjacent ones.

    >>> Mesh.of({"cp": 8}).groups("cp.inner2")
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> Mesh.of({"cp": 8}).groups("cp.outer2")
    [[0, 2, 4, 6], [1, 3, 5, 7]]

Several axes may be joined: parameters are stored over `fsdp`, which is `dp_shard`, `ep` and `cp` together.

    >>> mesh = Mesh.of({"dp_shard": 2, "cp": 3})
    >>> mesh.stored_over, mesh["fsdp"]
    ('fsdp', 6)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
SEQUENCE_AXIS = "cp"
BLOCKS = "blocks"  # the block table of a sequence, as an input of a program
HOPS = "hops"  # how far keys travel at each step of a ring, on the host
DATA_AXES = (*BATCH_AXES, SEQUENCE_AXIS)
STORED = ("dp_shard", "ep", "cp")
WEIGHT_AXES = ("tp",)  # weights stay and activations move
# joined axes, outermost first; they are adjacent in `AXES`
FLATTENED = {"fsdp": STORED, "experts": ("ep", "cp"), "experts_tp": ("ep", "cp", "tp")}


class MeshError(ValueError):
    """Invalid sizes: the faulty option, and the problem."""

    def __init__(self, option: str, problem: str):
        super().__init__(f"{option}: {problem}")
        self.option, self.problem = option, problem


@dataclass(frozen=True)
class Mesh:
    """Axis sizes in the order of `AXES`, the first axis outermost: rank = ((pp * P1 + dp_replicate) * P2 + ...).

    `ep` is the part of `dp_shard` that experts are sharded over, with `cp`, and with `tp` if it is in `experts`.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    experts: tuple[str, ...] = ()  # the axes that experts are spread over

    @staticmethod
    def of(sizes: dict[str, int]) -> Mesh:
        """Build a mesh from axis -> size (omitted axes have size 1); raise MeshError on an unknown axis or size.

        A size of `ep` adds no ranks: `dp_shard` of 4 and `ep` of 2 are 4 ranks, 2 of `dp_shard` by 2 of `ep`.
        """
        for axis, size in sizes.items():
            if axis not in AXES:
                raise MeshError(f"mesh.{axis}", f"no such axis; the axes are {', '.join(AXES)}")
            if size < 1:
                raise MeshError(f"mesh.{axis}", f"size is {size}, must be at least 1")
        sizes, experts = spread_experts(sizes)
        return Mesh(tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1), experts=experts)

    def without(self, axis: str) -> Mesh:
        """Return the mesh of the ranks with one coordinate on an axis."""
        return replace(self, sizes=tuple(pair for pair in self.sizes if pair[0] != axis))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes larger than one, outermost first."""
        return tuple(axis for axis, _ in self.sizes)

    @property
    def stored_over(self) -> str | None:
        """The axis over which parameters are stored; None if there is none."""
        stored = [axis for axis in STORED if axis in self.axes]
        return "fsdp" if "cp" in stored or len(stored) > 1 else stored[0] if stored else None

    @property
    def experts_over(self) -> str | None:
        """The axis over which experts are spread; None if each rank has all experts."""
        if not self.experts or self.stored_over and self.over(self.stored_over) == self.experts:
            return self.stored_over if self.experts else None
        if "tp" in self.experts:
            return "experts_tp"
        return "experts" if "cp" in self.experts else "ep"

    @property
    def flattened(self) -> dict[str, tuple[str, ...]]:
        """The names of joined axes, with their axes."""
        return {name: self.over(name) for name in FLATTENED if name in (self.stored_over, self.experts_over)}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes, joined ones included: a rank has a coordinate on each."""
        return (*self.axes, *self.flattened)

    def has(self, axis: str) -> bool:
        """Return True if there is such an axis or sub-axis."""
        try:
            return self.part(axis)[0] in self.names
        except ValueError:
            return False

    def over(self, axis: str) -> tuple[str, ...]:
        """Return the axes larger than one that an axis or sub-axis belongs to: itself, unless it is joined."""
        base, _, _ = self.part(axis)
        return tuple(a for a in FLATTENED.get(base, (base,)) if a in self.axes)

    def flatten(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Replace axes that have a joined name by that name: one collective over it serves all of them."""
        remaining = list(axes)
        for name, joined in self.flattened.items():
            if set(joined) <= set(remaining) and (len(joined) > 1 or name == self.stored_over):
                remaining = [name if axis == joined[0] else axis for axis in remaining if axis not in joined[1:]]
        return tuple(remaining)

    def together(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return axes outermost first; all axes of experts, if present, under their joined name."""
        covered = {a for axis in axes for a in self.over(axis)}
        names: dict[str, None] = {}
        for axis in (a for a in self.axes if a in covered):
            names[self.experts_over if axis in self.experts and covered >= set(self.experts) else axis] = None  # type: ignore[index]
        return tuple(names)

    # -- ranks --------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.sizes)

    def __getitem__(self, axis: str) -> int:
        base, inner, outer = self.part(axis)
        return self._size(base) // (inner * outer)

    def _size(self, axis: str) -> int:
        return math.prod(size for name, size in self.sizes if name in FLATTENED.get(axis, (axis,)))

    def part(self, axis: str) -> tuple[str, int, int]:
        """Return (axis of the mesh, number of adjacent groups, number of groups across) of an axis or a sub-axis."""
        match = re.fullmatch(r"(\w+)\.(inner|outer)(\d+)", axis)
        if match is None:
            return axis, 1, 1
        base, kind, count = match[1], match[2], int(match[3])
        size = self._size(base)
        if count < 1 or size % count:
            raise ValueError(f"{axis}: {count} neighbours do not divide mesh.{base}={size}")
        return (base, size // count, 1) if kind == "inner" else (base, 1, count)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis larger than one, joined axes included."""
        return {axis: rank // self.stride(axis) % self[axis] for axis in self.names}

    def stride(self, axis: str) -> int:
        """Return the distance in ranks from one rank of an axis to the next."""
        _, _, outer = self.part(axis)
        return outer * math.prod(size for _, size in self.sizes[self.axes.index(self.over(axis)[-1]) + 1 :])

    def group(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` only in their coordinate on `axis`, ordered by it."""
        base, inner, outer = self.part(axis)
        size, step = self[axis], self.stride(base)
        position = rank // step % self._size(base)
        begin = position - position % size if inner > 1 else position % outer
        return [rank + (begin + i * outer - position) * step for i in range(size)]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in their coordinate on `axis`, each ordered by it."""
        groups = (self.group(axis, rank) for rank in range(self.world_size))
        return [group for rank, group in enumerate(groups) if group[0] == rank]

    def __iter__(self) -> Iterator[dict[str, int]]:
        """Iterate over all coordinates, by rank."""
        return map(self.coordinates, range(self.world_size))


def spread_experts(sizes: dict[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return (sizes in which `ep` is a part of `dp_shard`, the axes that experts are spread over).

    Experts are spread over adjacent ranks: `cp`, then as much of `dp_shard` as needed, or all of it and `tp`. Raises
    MeshError if the sizes do not divide.
    """
    ep, dp, cp, tp = (sizes.get(axis, 1) for axis in ("ep", "dp_shard", "cp", "tp"))
    if ep == 1:
        return sizes, ()
    over_tp = tp > 1 and ep == dp * cp * tp
    inner = dp if over_tp else ep // cp
    if not over_tp and (ep % cp or dp % inner):
        fits = [str(n * cp) for n in range(1, dp + 1) if dp % n == 0 and n * cp > 1]
        fits += [str(dp * cp * tp)] if tp > 1 else []
        others = ", ".join(f"{axis}={size}" for axis, size in (("dp_shard", dp), ("cp", cp), ("tp", tp)) if size > 1)
        fix = f"with {others} it may be {' or '.join(fits)}" if others else "there is one rank"
        raise MeshError("mesh.ep", f"size is {ep}, experts are spread over the ranks of other axes; {fix}")
    parts = {"ep": inner, "cp": cp} | ({"tp": tp} if over_tp else {})
    return sizes | {"dp_shard": dp // inner, "ep": inner}, tuple(axis for axis, size in parts.items() if size > 1)
