"""The mesh of fewer ranks: `dp_replicate` shrinks first, then `dp_shard`, then `cp`; other axes keep their sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.step.captured import mesh_of

KEPT = ("pp", "tp")  # sizes that never change: a rank of such an axis has parts that no other rank has a program for


def shrunk(mesh: MeshConfig, ranks: int) -> MeshConfig | None:
    """Return the mesh that uses as many of `ranks` as possible; None if there is none, so that the job cannot go on.

    Of meshes of the same size, one that keeps `cp` is preferred, then one that keeps `dp_shard`.
    """
    copies = ranks // math.prod(getattr(mesh, axis) for axis in KEPT)
    largest = mesh.dp_replicate * mesh.dp_shard
    sizes = itertools.product(range(1, mesh.dp_replicate + 1), range(1, largest + 1), range(1, mesh.cp + 1))
    possible = [size for size in sizes if math.prod(size) <= copies and size[0] * size[1] <= largest]
    for replicas, shards, cp in sorted(possible, key=lambda s: (-math.prod(s), -s[2], abs(s[1] - mesh.dp_shard))):
        smaller = dataclasses.replace(mesh, dp_replicate=replicas, dp_shard=shards, cp=cp)
        try:
            mesh_of(smaller)
        except UserError:  # its ranks do not divide by mesh.ep
            continue
        return smaller
    return None
