"""Attention by interval on CUDA: FlexAttention's operator, with a block mask computed from bounds.

    out, lse = attend(q, k, v, first, last, ...)
becomes, when compiled for CUDA (`passes/lower/inductor.py`),
    out, lse = flex_attention(q, k, v, score, (partly seen blocks, fully seen blocks, mask), ...)

for which Inductor writes Triton kernels. The least and greatest bounds of a block of queries and the positions of a
block of keys tell if the pair of blocks sees nothing, something or all. No pair of query and key is looked at; memory
holds only counts and lists of blocks. FlexAttention's log-sum-exp has base 2, ours base e. The backward gets the result
and log-sum-exp over all keys, wherever these are, so that gradients of a ring's blocks add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from passes.context.kernels import pad_to_width
from passes.ops.attend import evaluate
from passes.torch_private import flex_attention, flex_attention_backward, gradients_inside, graph_of

BLOCK, BLOCKS = 128, 1024  # least positions of a block, most blocks of a sequence; blocks double until both hold
NARROWEST, WIDEST = 16, 256  # head widths that the kernels take; narrower heads are zero-padded
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FAR = 2**30  # beyond any position


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the reason why CUDA has no kernel by interval for these tensors, empty if it has one."""
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or q.dtype not in DTYPES:
        return f"the CUDA kernel takes {_listed(DTYPES)}, not {_listed(sorted(dtypes, key=str))}"
    if (width := max(q.shape[-1], v.shape[-1])) > WIDEST:
        return f"the CUDA kernel takes heads of up to {WIDEST}, not of {width}"
    return ""


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# ---- blocks -----------------------------------------------------------------------------------------


def block_size(rows: int, keys: int) -> int:
    """Return the number of positions of a block."""
    size = BLOCK
    while size * BLOCKS < max(rows, keys):
        size *= 2
    return size


def positions(runs: Tensor | None, keys: int, device: torch.device) -> Tensor:
    """Return each key's position in the sequence, i32[t]."""
    index = torch.arange(keys, dtype=torch.int32, device=device)
    if runs is None:
        return index
    length = keys // runs.shape[0]
    return (runs.to(torch.int32)[:, None] + index[:length]).flatten()


def in_blocks(x: Tensor, size: int, fill: int) -> Tensor:
    """Split the last dim into blocks, [..., n] -> [..., n / size, size], and pad the last block."""
    return F.pad(x, [0, -x.shape[-1] % size], value=fill).unflatten(-1, (-1, size))


def pairs_of_blocks(first: Tensor, last: Tensor, key_positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return which query blocks see a key block in part, and which see all of it, bool[b, 1, s / size, t / size] each.

    Bounds are i32[b, s], positions i32[t]. A block that ends beyond the sequence is never fully seen.
    """
    empty = last <= first
    first, last = torch.where(empty, FAR, first), torch.where(empty, -FAR, last)
    lowest, highest = in_blocks(first, size, FAR).amin(-1), in_blocks(last, size, -FAR).amax(-1)
    latest, soonest = in_blocks(first, size, FAR).amax(-1), in_blocks(last, size, -FAR).amin(-1)
    begin, end = in_blocks(key_positions, size, FAR).amin(-1), in_blocks(key_positions, size, -FAR).amax(-1)
    partial = (lowest[..., None] <= end) & (highest[..., None] > begin)
    inside = torch.arange(1, len(begin) + 1, device=key_positions.device) * size <= len(key_positions)
    full = (latest[..., None] <= begin) & (soonest[..., None] > end) & inside
    return (partial & ~full).unsqueeze(1), full.unsqueeze(1)


def block_lists(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row, i32[..., m], and their indices, first and in order, i32[..., m, n]."""
    count, blocks = pairs.cumsum(-1, dtype=torch.int32), pairs.shape[-1]
    if blocks == 1:  # Triton does not compile the search for a constant (torch 2.11 to 2.13)
        return pairs.sum(-1, dtype=torch.int32), torch.zeros_like(count)
    number = torch.arange(1, blocks + 1, dtype=torch.int32, device=pairs.device).expand(pairs.shape).contiguous()
    order = torch.searchsorted(count.contiguous(), number, out_int32=True).clamp(max=blocks - 1)
    return pairs.sum(-1, dtype=torch.int32), order


def block_mask(first: Tensor, last: Tensor, key_positions: Tensor, sees: Callable[..., Tensor]) -> BlockMask:
    """Return FlexAttention's block mask: the key blocks that each query block sees, and the reverse."""
    size = block_size(first.shape[-1], len(key_positions))
    kinds = pairs_of_blocks(first, last, key_positions, size)
    (partial, partial_at), (full, full_at) = (block_lists(kind) for kind in kinds)
    (partial_of, partial_of_at), (full_of, full_of_at) = (block_lists(kind.transpose(-1, -2)) for kind in kinds)
    return BlockMask(
        seq_lengths=(first.shape[-1], len(key_positions)),
        kv_num_blocks=partial,
        kv_indices=partial_at,
        full_kv_num_blocks=full,
        full_kv_indices=full_at,
        q_num_blocks=partial_of,
        q_indices=partial_of_at,
        full_q_num_blocks=full_of,
        full_q_indices=full_of_at,
        BLOCK_SIZE=(size, size),
        mask_mod=sees,
    )


# ---- the operator -----------------------------------------------------------------------------------


def entry(x: Tensor, *at: Tensor) -> Tensor:
    """Return an entry of a tensor, with an index for each dim; dims of size 1 ignore theirs."""
    index = [torch.zeros_like(i) if n == 1 else i for i, n in zip(at, x.shape)]
    return torch.ops.aten.index.Tensor(x, index)  # `x[i]` would call `item()`


def kernel_arguments(arguments: Sequence[Any], keys: int) -> tuple[Callable, BlockMask, tuple, tuple]:
    """Return FlexAttention's arguments: the score function, the block mask, and the tensors that either reads."""
    first, last, runs, terms, _, score = arguments
    first, last = (x.to(torch.int32) for x in (first, last))
    key_positions = positions(runs, keys, first.device)

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor, last: Tensor, key_positions: Tensor) -> Tensor:
        return (entry(first, b, i) <= entry(key_positions, j)) & (entry(key_positions, j) < entry(last, b, i))

    def change(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *read: Tensor) -> Tensor:
        if not read:
            return x
        key_positions, *terms = read
        return evaluate(score, x, entry(key_positions, j), [entry(t, b, h, i, torch.zeros_like(i)) for t in terms])

    return (
        change,
        block_mask(first, last, key_positions, sees),
        (key_positions, *terms) if score else (),
        (first, last, key_positions),
    )


def gradient_of(change: Callable, read: Sequence[Tensor], q: Tensor) -> Callable:
    """Return the score function's gradient: (score, b, h, i, j, gradient, *read) -> [gradient of score, None, ...]."""

    def joint(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, gradient: Tensor, *read: Tensor) -> list:
        others = [None, None, None, None, *[None] * len(read)]
        if not read:
            return [gradient, *others]
        with gradients_inside():
            x = x.detach().requires_grad_()
            (score_gradient,) = torch.autograd.grad(change(x, b, h, i, j, *read), x, gradient)
        return [score_gradient, *others]

    score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    places = [torch.zeros((), dtype=torch.int32, device=q.device) for _ in range(4)]
    return graph_of(joint, score, *places, score.clone(), *read)


def widths(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the head widths of queries and values that the kernels take.

    PyTorch chooses the tile of a thread block from a table by the query width. If the width is not in it, or values are
    wider than queries, the kernel may need more shared memory than there is.
    """
    value = max(v.shape[-1], NARROWEST)
    wide = max(q.shape[-1], value)
    if wide > 128:
        wide = 192 if wide <= 192 and q.dtype.itemsize == 2 else WIDEST
    return wide, value


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute `attend` with FlexAttention."""
    change, mask, read, bounds = kernel_arguments(arguments, k.shape[2])
    wide, value = widths(q, v)
    tensors = pad_to_width(q, wide), pad_to_width(k, wide), pad_to_width(v, value)
    out, lse = flex_attention(*tensors, change, mask, arguments[4], read, bounds)
    return out[..., : v.shape[-1]].contiguous(), lse * math.log(2)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Compute `attend_backward` with FlexAttention."""
    change, mask, read, bounds = kernel_arguments(arguments, k.shape[2])
    wide, value = widths(q, v)
    lse = torch.where(lse > -math.inf, lse / math.log(2), 0.0)
    tensors = [
        pad_to_width(q, wide),
        pad_to_width(k, wide),
        pad_to_width(v, value),
        pad_to_width(out, value),
        lse,
        pad_to_width(gradient, value),
    ]
    gradients = flex_attention_backward(tensors, change, gradient_of(change, read, q), mask, arguments[4], read, bounds)
    return tuple(new[..., : x.shape[-1]].contiguous() for new, x in zip(gradients, (q, k, v)))
