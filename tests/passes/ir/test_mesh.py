"""Groups of ranks along an axis, and the group of a rank."""

from __future__ import annotations

import pytest

from passes.ir.mesh import Mesh

MESHES = (
    {"dp_shard": 4, "tp": 2}, {"cp": 8}, {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2},
    {"dp_shard": 8, "ep": 4}, {"dp_shard": 4, "cp": 2, "ep": 4}, {"dp_shard": 2, "tp": 2, "ep": 4},
)  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_group_has_the_ranks_that_differ_on_its_axis_only(sizes):
    mesh = Mesh.of(sizes)
    for axis in mesh.names:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            places = [mesh.coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(mesh[axis]))
            apart = [{a: n for a, n in place.items() if a in mesh.axes and a not in mesh.over(axis)} for place in places]
            assert all(other == apart[0] for other in apart)
            assert all(mesh.group(axis, rank) == group for rank in group)
        for part in (f"{axis}.inner2", f"{axis}.outer2") if mesh[axis] % 2 == 0 else ():
            assert all(mesh.group(part, rank) == group for group in mesh.groups(part) for rank in group)
            assert all(set(group) <= set(mesh.group(axis, group[0])) for group in mesh.groups(part))
