"""A mesh of ranks with named axes, and where each rank stands in it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
BATCH_AXES = ("dp_replicate", "dp_shard")
SEQUENCE_AXIS = "cp"
WEIGHT_AXES = ("tp", "ep")  # where weights stay and activations move


@dataclass(frozen=True)
class Mesh:
    """Axis sizes in the order of `AXES`, the first axis outermost: rank = ((pp * P1 + dp_replicate) * P2 + ...).

    A rank of a `folded` axis holds two chunks of what the axis shards, head and tail (`passes/program/layout.py`).
    Of any axis neighbours alone may communicate, or ranks that stand alike among theirs: with `cp` of 8, "cp.inner2"
    are 4 groups of 2 neighbours and "cp.outer2" 2 groups of 4, one rank of each 2.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    folded: frozenset[str] = frozenset()

    @staticmethod
    def of(sizes: dict[str, int]) -> Mesh:
        """Build a mesh from axis -> size (axes left out have size 1); raises ValueError on an unknown axis or size."""
        for axis, size in sizes.items():
            if axis not in AXES:
                raise ValueError(f"mesh.{axis}: no such axis; the axes are {', '.join(AXES)}")
            if size < 1:
                raise ValueError(f"mesh.{axis}: size is {size}, must be at least 1")
        return Mesh(tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes larger than one, outermost first."""
        return tuple(axis for axis, _ in self.sizes)

    def has(self, axis: str) -> bool:
        """Whether there is such an axis, or part of one."""
        try:
            return self.part(axis)[0] in self.axes
        except ValueError:
            return False

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.sizes)

    def __getitem__(self, axis: str) -> int:
        base, inner, outer = self.part(axis)
        return dict(self.sizes).get(base, 1) // (inner * outer)

    def part(self, axis: str) -> tuple[str, int, int]:
        """(axis of the mesh, how many groups of neighbours, how many groups across) of an axis or a part of one."""
        found = re.fullmatch(r"(\w+)\.(inner|outer)(\d+)", axis)
        if found is None:
            return axis, 1, 1
        base, which, count = found[1], found[2], int(found[3])
        size = dict(self.sizes).get(base, 1)
        if count < 1 or size % count:
            raise ValueError(f"{axis}: {count} neighbours do not divide mesh.{base}={size}")
        return (base, size // count, 1) if which == "inner" else (base, 1, count)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis larger than one."""
        coordinates = {}
        for axis, size in reversed(self.sizes):
            rank, coordinates[axis] = divmod(rank, size)
        return dict(reversed(coordinates.items()))

    def stride(self, axis: str) -> int:
        """How many ranks lie from one of an axis to the next."""
        base, _, outer = self.part(axis)
        return outer * math.prod(size for name, size in self.sizes[self.axes.index(base) + 1 :])

    def groups(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ in their coordinate on `axis` only, each ordered by it."""
        base, inner, outer = self.part(axis)
        size = self[axis]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            here = place[base]
            among = here // size if inner > 1 else here % outer
            groups.setdefault((among, *(v for k, v in place.items() if k != base)), []).append(rank)
        return list(groups.values())

    def __iter__(self):
        """All coordinates, by rank."""
        for place in itertools.product(*(range(size) for _, size in self.sizes)):
            yield dict(zip(self.axes, place))
