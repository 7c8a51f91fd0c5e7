"""Attention by interval as FlexAttention computes it, its block mask made of bounds: what `ct::attend` is held against.

Which pairs of blocks see nothing, something or all follows from the least and greatest bound of a block of queries and
the positions of a block of keys, so no pair of query and key is looked at. What comes back is the log-sum-exp in natural
logarithms, and the backward takes that of all keys, so that blocks of a ring add up. A block is of 128 positions, of
more where a sequence has over 2^17 of them: its mask then takes no more than a few MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from passes.program.attend import evaluate

FLEX, BACKWARD = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
BLOCK, BLOCKS = 128, 1024  # positions of a block; so many blocks a sequence, or fewer
FAR = 2**30


def block_size(rows: int, keys: int) -> int:
    """Positions of a block."""
    size = BLOCK
    while size * BLOCKS < max(rows, keys):
        size *= 2
    return size


def positions(runs: Tensor | None, keys: int, device: torch.device) -> Tensor:
    """Where each key lies in the sequence, i32[t]."""
    index = torch.arange(keys, dtype=torch.int32, device=device)
    if runs is None:
        return index
    held = keys // runs.shape[0]
    return (runs.to(torch.int32)[:, None] + index[:held]).flatten()


def in_blocks(x: Tensor, size: int, filled: int) -> Tensor:
    """The last dim in blocks, [..., n] -> [..., n / size, size], the last one filled up."""
    return torch.nn.functional.pad(x, [0, -x.shape[-1] % size], value=filled).unflatten(-1, (-1, size))


def block_mask(first: Tensor, last: Tensor, where: Tensor, size: int, sees: Callable[..., Tensor]) -> BlockMask:
    """What blocks of queries see of blocks of keys, by bounds i32[b, s] and positions i32[t]."""
    empty = last <= first
    lowest, highest = (in_blocks(torch.where(empty, out, x), size, out) for x, out in ((first, FAR), (last, -1)))
    latest, soonest = (in_blocks(torch.where(empty, out, x), size, -out) for x, out in ((first, FAR), (last, -FAR)))
    start, end = (in_blocks(where, size, out) for out in (FAR, -FAR))
    start, end = start.amin(-1), end.amax(-1)

    def pairs(low: Tensor, high: Tensor, begin: Tensor, stop: Tensor) -> Tensor:
        return ((low[..., None] <= begin) & (high[..., None] > stop)).unsqueeze(1)

    some = pairs(lowest.amin(-1), highest.amax(-1), end, start)
    all_of_it = pairs(latest.amax(-1), soonest.amin(-1), start, end)
    kinds = [listed(some & ~all_of_it), listed(all_of_it)]
    return BlockMask.from_kv_blocks(*kinds[0], *kinds[1], (size, size), sees, (first.shape[-1], where.shape[0]))


def listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which these are, first."""
    order = pairs.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), order.to(torch.int32)


def of_one(x: Tensor, *at: Tensor) -> Tensor:
    """An entry of a tensor, by an index for each dim that is not of size one."""
    index = [torch.zeros_like(i) if n == 1 else i for i, n in zip(at, x.shape)]
    return torch.ops.aten.index.Tensor(x, index)  # `x[i]` would ask for the number


def told(given: Sequence[Any], keys: int) -> tuple[Any, ...]:
    """The operator's block mask and score function, and the tensors that these read."""
    first, last, runs, terms, _, score = given
    first, last = (x.to(torch.int32) for x in (first, last))
    where = positions(runs, keys, first.device)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor, last: Tensor, where: Tensor) -> Tensor:
        return (of_one(first, b, i) <= of_one(where, j)) & (of_one(where, j) < of_one(last, b, i))

    def change(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, where: Tensor, *terms: Tensor) -> Tensor:
        near = (of_one(t, b, h, i, torch.zeros_like(i)) for t in terms)
        return evaluate(score, x, of_one(where, j), list(near))

    def alone(x: Tensor, *_: Tensor) -> Tensor:
        return x

    mask = block_mask(first, last, where, block_size(first.shape[-1], keys), sees)
    return mask.as_tuple(), change if score else alone, (where, *terms) if score else (), (first, last, where)


def forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """`attend` by FlexAttention."""
    mask, change, read, bounds = told(given, k.shape[2])
    out, lse, _ = FLEX(q, k, v, change, mask, given[4], {}, read, bounds)
    return out.contiguous(), lse * math.log(2)


def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any):
    """`attend_backward` by FlexAttention."""
    mask, change, read, bounds = told(given, k.shape[2])
    number = [torch.zeros((), dtype=torch.int32, device=q.device) for _ in range(4)]
    score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def joint(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, g: Tensor, *read: Tensor) -> list[Tensor | None]:
        _, back = torch.func.vjp(lambda x: change(x, b, h, i, j, *read), x)
        return [back(g)[0], None, None, None, None, *[None] * len(read)]

    graphs = make_fx(change)(score, *number, *read), make_fx(joint)(score, *number, score.clone(), *read)
    given_lse = lse / math.log(2)
    found = BACKWARD(
        q, k, v, out, given_lse, gradient, torch.zeros_like(given_lse), *graphs, mask, given[4], {}, read, bounds
    )
    return tuple(x.contiguous() for x in found[:3])


