"""The balance of attention work over the ranks of `cp`, in pairs of a query and a key that it sees.

`key_counts` hold the number of keys that each query sees, i64[B, T]: in causal attention the query at i sees i + 1;
within documents, positions + 1, because positions restart at 0 in each. There is one tensor for each attention with
different bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ir.mesh import SEQUENCE_AXIS as AXIS
from passes.ir.mesh import Mesh
from passes.ir.order import Order, Table
from passes.ir.spec import Factor
from passes.ops.shift import divisors

EVEN = 1.02  # stop moving blocks once the busiest rank does less than this times the mean


def pairs_by_rank(key_counts: Tensor, mesh: Mesh, order: Order) -> Tensor:
    """Return the number of keys that all queries of each rank of `cp` see, i64[P]."""
    factor, before = Factor(key_counts.shape[-1], (AXIS,), order=order), F.pad(key_counts.sum(0).cumsum(0), [1, 0])
    runs = (factor.runs(mesh, {AXIS: rank}) for rank in range(mesh[AXIS]))
    return torch.tensor(
        [sum(int(before[start + n] - before[start]) for start, _, n in rank_runs) for rank_runs in runs]
    )


def imbalance(key_counts: Sequence[Tensor], mesh: Mesh, order: Order) -> float:
    """Return the work of the busiest rank of `cp` over the mean: 1 if all ranks do the same."""
    work = torch.stack([pairs_by_rank(counts, mesh, order) for counts in key_counts]).sum(0).double()
    return float(work.max() / work.mean())


def ranks_that_meet(first: Tensor, last: Tensor, mesh: Mesh, order: Order) -> Tensor:
    """Return bool[P, P], True at [i, j] if a query of rank i sees a key of rank j.

    Bounds of all queries are i64[b, s].
    """
    first, last = torch.broadcast_tensors(first.cpu(), last.cpu())
    ranks, chunks = mesh[AXIS], mesh[AXIS] * order.chunks
    size, owner = -(-first.shape[-1] // chunks), torch.zeros(chunks, dtype=torch.int64)
    for rank in range(ranks):
        owner[list(order.chunks_of(rank, ranks))] = rank
    sees = last > first
    queries = owner[torch.arange(first.shape[-1]) // size].expand_as(first)[sees]
    edges = torch.zeros(ranks, chunks + 1, dtype=torch.int64)
    ones = torch.ones_like(queries)
    edges.index_put_((queries, first[sees] // size), ones, accumulate=True)
    edges.index_put_((queries, (last[sees] - 1) // size + 1), -ones, accumulate=True)
    chunks_seen = edges.cumsum(1)[:, :chunks] > 0
    return torch.zeros(ranks, ranks, dtype=torch.int64).index_add_(1, owner, chunks_seen.long()) > 0


def hops_of(meet: Tensor) -> Tensor:
    """Return the distance from each ring step that any rank needs to the next one, or home from the last; 0 at others.

    i64[D, P]: a row for each of `divisors(P)`, which are the sizes of the groups across which the ring runs; 1 first.
    """
    ranks = len(meet)
    table = torch.zeros(len(divisors(ranks)), ranks, dtype=torch.int64)
    for hops, inner in zip(table, divisors(ranks), strict=True):
        places = ranks // inner
        needed = sorted({0, *((i // inner - j // inner) % places for i, j in meet.nonzero().tolist())})
        for step, next_step in itertools.pairwise((*needed, places)):
            hops[step] = next_step - step
    return table


def work_of_blocks(key_counts: Sequence[Tensor], count: int) -> Tensor:
    """Return the number of keys that all queries of each of `count` equal blocks see, i64[count]."""
    rows = (counts.sum(0) for counts in key_counts)
    return torch.stack([F.pad(row, [0, -len(row) % count]).view(count, -1).sum(1) for row in rows]).sum(0)


def assign_blocks(work: Tensor, ranks: int) -> Table:
    """Return the blocks of each rank, in rising order: an even number, the same for all ranks, with balanced work.

    Start from head and tail, which keeps neighbours together. Then the busiest and the idlest rank exchange the two
    blocks that bring them closest, until the busiest is within `EVEN` of the mean or no exchange helps.
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
