"""How evenly the ranks of `cp` share the work of attention, the pairs of queries and keys that see each other.

`seen` are the keys seen by each query, i64[B, T]: of causal attention a query at i sees i + 1; within documents,
positions + 1, as these count from 0 in each. Of several attentions that see otherwise there are several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.program.mesh import SEQUENCE_AXIS as AXIS
from passes.program.mesh import Mesh
from passes.program.order import Order, Table
from passes.program.shift import divisors
from passes.program.spec import Factor

EVEN = 1.02  # blocks stay where they are once the busiest rank does less than this times the mean


def pairs_by_rank(seen: Tensor, mesh: Mesh, order: Order) -> Tensor:
    """Keys seen by all queries of each rank of `cp`, i64[P]."""
    factor, before = Factor(seen.shape[-1], (AXIS,), order=order), F.pad(seen.sum(0).cumsum(0), [1, 0])
    runs = (factor.runs(mesh, {AXIS: rank}) for rank in range(mesh[AXIS]))
    return torch.tensor([sum(int(before[start + n] - before[start]) for start, _, n in held) for held in runs])


def imbalance(seen: Sequence[Tensor], mesh: Mesh, order: Order) -> float:
    """The most that a rank of `cp` has to do over the mean: 1 if all do the same."""
    work = torch.stack([pairs_by_rank(each, mesh, order) for each in seen]).sum(0).double()
    return float(work.max() / work.mean())


def ranks_that_meet(first: Tensor, last: Tensor, mesh: Mesh, order: Order) -> Tensor:
    """Which ranks' queries see any of which ranks' keys, bool[P, P], by bounds of all queries, i64[b, s]."""
    first, last = torch.broadcast_tensors(first.cpu(), last.cpu())
    ranks, chunks = mesh[AXIS], mesh[AXIS] * order.chunks
    size, owner = -(-first.shape[-1] // chunks), torch.zeros(chunks, dtype=torch.int64)
    for rank in range(ranks):
        owner[list(order.held(rank, ranks))] = rank
    sees = last > first
    queries = owner[torch.arange(first.shape[-1]) // size].expand_as(first)[sees]
    edges = torch.zeros(ranks, chunks + 1, dtype=torch.int64)
    one = torch.ones_like(queries)
    edges.index_put_((queries, first[sees] // size), one, accumulate=True)
    edges.index_put_((queries, (last[sees] - 1) // size + 1), -one, accumulate=True)
    seen = edges.cumsum(1)[:, :chunks] > 0
    return torch.zeros(ranks, ranks, dtype=torch.int64).index_add_(1, owner, seen.long()) > 0


def hops_of(meet: Tensor) -> Tensor:
    """From each step of a ring that any rank needs to the next, from the last one home; 0 at the others.

    i64[D, P]: of rings across groups of each of `divisors(P)` ranks, first across single ones.
    """
    ranks = len(meet)
    found = torch.zeros(len(divisors(ranks)), ranks, dtype=torch.int64)
    for hops, inner in zip(found, divisors(ranks), strict=True):
        places = ranks // inner
        needed = sorted({0, *((i // inner - j // inner) % places for i, j in meet.nonzero().tolist())})
        for here, there in itertools.pairwise((*needed, places)):
            hops[here] = there - here
    return found


def work_of_blocks(seen: Sequence[Tensor], count: int) -> Tensor:
    """Keys seen by all queries of each of so many equal blocks, i64[count]."""
    rows = (each.sum(0) for each in seen)
    return torch.stack([F.pad(row, [0, -len(row) % count]).view(count, -1).sum(1) for row in rows]).sum(0)


def assign_blocks(work: Tensor, ranks: int) -> Table:
    """Blocks for each rank, an even number and as many for each, in rising order: all with about as much work.

    From head and tail on, which leaves neighbours together, the busiest rank exchanges blocks with the one that has
    least to do, each time those two that bring both nearest, until it is within `EVEN` of the mean or nothing helps.
    """
    chunks = torch.arange(len(work)).view(2 * ranks, -1)
    table = torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], 1)
    while True:
        mine = work[table]
        total = mine.sum(1)
        busy, idle = int(total.argmax()), int(total.argmin())
        gap = total[busy] - total[idle]
        left = (gap - 2 * (mine[busy][:, None] - mine[idle])).abs()
        i, j = divmod(int(left.argmin()), table.shape[1])
        if total[busy] * ranks <= EVEN * total.sum() or left[i, j] >= gap:
            return tuple(map(tuple, table.sort(1).values.tolist()))
        table[busy, i], table[idle, j] = int(table[idle, j]), int(table[busy, i])
