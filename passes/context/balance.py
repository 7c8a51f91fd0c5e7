"""How evenly the ranks of `cp` share the work of attention: the pairs of queries and keys that see each other."""

from __future__ import annotations

import torch
from torch import Tensor

from passes.program.layout import entries
from passes.program.mesh import SEQUENCE_AXIS as AXIS
from passes.program.mesh import Mesh
from passes.program.spec import Factor


def pairs_by_rank(seen: Tensor, mesh: Mesh) -> Tensor:
    """Keys seen by all queries of each rank of `cp`, i64[P], from those seen by each query, i64[B, T].

    Of causal attention a query at i sees i + 1; within documents, positions + 1, as these count from 0 in each.
    """
    factor = Factor(seen.shape[-1], (AXIS,))
    found = []
    for rank in range(mesh[AXIS]):
        index, valid = entries(factor, mesh, {AXIS: torch.tensor(rank)}, seen.device)
        found.append(seen.index_select(-1, index[valid]).sum())
    return torch.stack(found)


def imbalance(seen: Tensor, mesh: Mesh) -> float:
    """The most that a rank of `cp` has to do over the mean: 1 if all do the same."""
    work = pairs_by_rank(seen, mesh).double()
    return float(work.max() / work.mean())
