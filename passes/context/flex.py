"""Attention by interval on CUDA: FlexAttention's operator, whose block mask is made of bounds.

    out, lse = attend(q, k, v, first, last, ...)
becomes, when a body is compiled for CUDA (`passes/lower/inductor.py`),
    out, lse = flex_attention(q, k, v, score, (blocks seen in part, blocks seen whole, mask), ...)

and so kernels that Inductor writes in Triton. Which pairs of blocks see nothing, something or all follows from the
least and greatest bound of a block of queries and the positions of a block of keys: no pair of query and key is looked
at, and nothing but counts and lists of blocks is in memory. Their log-sum-exp is of base 2 and ours is not. The
backward is given the result and log-sum-exp over all keys, wherever these are, so that blocks of a ring add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from passes.program.attend import evaluate
from passes.program.torch_private import flex_attention, flex_attention_backward, gradients_inside, graph_of

BLOCK, BLOCKS = 128, 1024  # positions of a block, doubled until a sequence has no more blocks than these
NARROWEST, WIDEST = 16, 256  # heads that the kernels take; narrower ones are filled up
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FAR = 2**30  # beyond any position


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why CUDA has no kernel by interval for these, empty if it has one."""
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or q.dtype not in DTYPES:
        return f"the kernel of CUDA takes {_listed(DTYPES)}, not {_listed(sorted(dtypes, key=str))}"
    if (width := max(q.shape[-1], v.shape[-1])) > WIDEST:
        return f"the kernel of CUDA takes heads of up to {WIDEST}, not of {width}"
    return ""


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# ---- blocks -----------------------------------------------------------------------------------------


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
    return F.pad(x, [0, -x.shape[-1] % size], value=filled).unflatten(-1, (-1, size))


def pairs_of_blocks(first: Tensor, last: Tensor, where: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which blocks of queries see some of a block of keys but not all, and which all, bool[b, 1, s / size, t / size].

    Bounds are i32[b, s], positions i32[t]. A block that ends beyond the sequence is never seen as a whole.
    """
    empty = last <= first
    first, last = torch.where(empty, FAR, first), torch.where(empty, -FAR, last)
    lowest, highest = in_blocks(first, size, FAR).amin(-1), in_blocks(last, size, -FAR).amax(-1)
    latest, soonest = in_blocks(first, size, FAR).amax(-1), in_blocks(last, size, -FAR).amin(-1)
    begin, end = in_blocks(where, size, FAR).amin(-1), in_blocks(where, size, -FAR).amax(-1)
    some = (lowest[..., None] <= end) & (highest[..., None] > begin)
    inside = torch.arange(1, len(begin) + 1, device=where.device) * size <= len(where)
    whole = (latest[..., None] <= begin) & (soonest[..., None] > end) & inside
    return (some & ~whole).unsqueeze(1), whole.unsqueeze(1)


def listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, i32[..., m], and which these are, first and in order, i32[..., m, n]."""
    count, blocks = pairs.cumsum(-1, dtype=torch.int32), pairs.shape[-1]
    if blocks == 1:  # Triton refuses the search for a constant (torch 2.11 to 2.13)
        return pairs.sum(-1, dtype=torch.int32), torch.zeros_like(count)
    number = torch.arange(1, blocks + 1, dtype=torch.int32, device=pairs.device).expand(pairs.shape).contiguous()
    order = torch.searchsorted(count.contiguous(), number, out_int32=True).clamp(max=blocks - 1)
    return pairs.sum(-1, dtype=torch.int32), order


def block_mask(first: Tensor, last: Tensor, where: Tensor, sees: Callable[..., Tensor]) -> BlockMask:
    """What blocks of queries see of blocks of keys, and what blocks of keys are seen by."""
    size = block_size(first.shape[-1], len(where))
    kinds = pairs_of_blocks(first, last, where, size)
    (some, some_at), (whole, whole_at) = (listed(kind) for kind in kinds)
    (some_of, some_of_at), (whole_of, whole_of_at) = (listed(kind.transpose(-1, -2)) for kind in kinds)
    return BlockMask(
        seq_lengths=(first.shape[-1], len(where)),
        kv_num_blocks=some,
        kv_indices=some_at,
        full_kv_num_blocks=whole,
        full_kv_indices=whole_at,
        q_num_blocks=some_of,
        q_indices=some_of_at,
        full_q_num_blocks=whole_of,
        full_q_indices=whole_of_at,
        BLOCK_SIZE=(size, size),
        mask_mod=sees,
    )


# ---- the operator -----------------------------------------------------------------------------------


def entry(x: Tensor, *at: Tensor) -> Tensor:
    """An entry of a tensor, by an index for each dim that is not of size one."""
    index = [torch.zeros_like(i) if n == 1 else i for i, n in zip(at, x.shape)]
    return torch.ops.aten.index.Tensor(x, index)  # `x[i]` would ask for the number


def told(given: Sequence[Any], keys: int) -> tuple[Callable, BlockMask, tuple, tuple]:
    """What the operator takes: the score function, the block mask, and the tensors that either reads."""
    first, last, runs, terms, _, score = given
    first, last = (x.to(torch.int32) for x in (first, last))
    where = positions(runs, keys, first.device)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor, last: Tensor, where: Tensor) -> Tensor:
        return (entry(first, b, i) <= entry(where, j)) & (entry(where, j) < entry(last, b, i))

    def change(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        if not read:
            return x
        where, *terms = read
        return evaluate(score, x, entry(where, j), [entry(t, b, h, i, torch.zeros_like(i)) for t in terms])

    return change, block_mask(first, last, where, sees), (where, *terms) if score else (), (first, last, where)


def gradient_of(change: Callable, read: Sequence[Tensor], q: Tensor) -> Callable:
    """The score function's gradient: (score, b, h, i, j, gradient, *read) -> that of the score, and nothing else."""

    def joint(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, gradient: Tensor, *read: Tensor) -> list:
        rest = [None, None, None, None, *[None] * len(read)]
        if not read:
            return [gradient, *rest]
        with gradients_inside():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(change(x, b, h, i, j, *read), x, gradient)
        return [found, *rest]

    score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    places = [torch.zeros((), dtype=torch.int32, device=q.device) for _ in range(4)]
    return graph_of(joint, score, *places, score.clone(), *read)


def filled(x: Tensor, width: int) -> Tensor:
    """Heads filled up with zeros."""
    return F.pad(x, [0, width - x.shape[-1]]) if x.shape[-1] < width else x


def widths(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Of heads of queries and values as the kernels take them.

    From the first a table of PyTorch's has the size of what a block of threads holds: a width that is not in it, or
    values wider than queries, may take more shared memory than there is.
    """
    value = max(v.shape[-1], NARROWEST)
    wide = max(q.shape[-1], value)
    if wide > 128:
        wide = 192 if wide <= 192 and q.dtype.itemsize == 2 else WIDEST
    return wide, value


def forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """`attend` by FlexAttention."""
    change, mask, read, bounds = told(given, k.shape[2])
    wide, value = widths(q, v)
    tensors = filled(q, wide), filled(k, wide), filled(v, value)
    out, lse = flex_attention(*tensors, change, mask, given[4], read, bounds)
    return out[..., : v.shape[-1]].contiguous(), lse * math.log(2)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    """`attend_backward` by FlexAttention."""
    change, mask, read, bounds = told(given, k.shape[2])
    wide, value = widths(q, v)
    lse = torch.where(lse > -math.inf, lse / math.log(2), 0.0)
    tensors = [filled(q, wide), filled(k, wide), filled(v, value), filled(out, value), lse, filled(gradient, value)]
    found = flex_attention_backward(tensors, change, gradient_of(change, read, q), mask, given[4], read, bounds)
    return tuple(new[..., : x.shape[-1]].contiguous() for new, x in zip(found, (q, k, v)))
