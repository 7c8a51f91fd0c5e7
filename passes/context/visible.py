"""Attention by interval on the CPU: blocks that some query sees and no others, each by a kernel of attention.

Time and memory follow the pairs that see each other, and no mask is ever whole. The eager backend runs the same on
CUDA, where it waits for the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from passes.context import kernels
from passes.context.kernels import Block, wide
from passes.program.attend import evaluate, library

ROWS, KEYS = 128, 4096  # of a tile that has a mask of its own
FEW = 48  # queries that see alike are not worth a call of their own
LEAST_WORK = 2**24  # of a call: pairs, heads and widths multiplied
TRIANGLES = 128, 4096  # rows of the smallest and largest that are cut: flash attention computes all of small ones


class Piece(NamedTuple):
    """Queries that see keys of one range: all of them, or each one more than the one before, or as bounds say."""

    rows: slice
    keys: slice
    causal: bool = False
    masked: bool = False


def pieces(first: Tensor, last: Tensor, few: int = FEW, least: int = TRIANGLES[0]) -> Iterator[Piece]:
    """What queries see of the keys of one run, by `first` and `last` among these, i64[s]; no two pieces meet.

    Causal ones have no less than `least` rows if there were as many.
    """
    rows, start, mixed = len(first), 0, 0  # from `mixed` on, queries wait to be put into one tile
    rise = last.diff()
    kinds = torch.where(first.diff() == 0, torch.where(rise == 0, 1, torch.where(rise == 1, 2, 0)), 0)
    turns = iter([*(torch.nonzero(kinds.diff()).flatten() + 1).tolist(), len(kinds)])
    turn = 0
    while start < rows:
        while turn <= start < len(kinds):
            turn = next(turns)
        kind = int(kinds[start]) if start < len(kinds) else 0  # how the next query sees otherwise than this one
        end = turn + 1 if kind else start + 1
        if end - start >= few:
            yield from tile(first, last, mixed, start)
            yield from alike_rows(slice(start, end), int(first[start]), int(last[start]), kind == 2, least)
            mixed = end
        elif end - mixed > ROWS:
            yield from tile(first, last, mixed, start)
            mixed = start
        start = end
    yield from tile(first, last, mixed, rows)


def alike_rows(rows: slice, first: int, last: int, rises: bool, least: int) -> Iterator[Piece]:
    """Queries that see from one key on, to one key or each a key further than the one before."""
    if not rises:
        if last > first:
            yield Piece(rows, slice(first, last))
        return
    if last <= first:  # the first ones see nothing
        rows, last = slice(rows.start + first + 1 - last, rows.stop), first + 1
    if last - 1 > first:
        yield Piece(rows, slice(first, last - 1))
    if rows.stop > rows.start:
        yield from triangle(rows, last - 1, least)


def triangle(rows: slice, first: int, least: int) -> Iterator[Piece]:
    """Queries of which each sees from `first` on a key more than the one before, in triangles and squares."""
    size = rows.stop - rows.start
    if not 2 * least <= size <= TRIANGLES[1]:
        yield Piece(rows, slice(first, first + size), causal=True)
        return
    middle = rows.start + size // 2
    yield from triangle(slice(rows.start, middle), first, least)
    yield Piece(slice(middle, rows.stop), slice(first, first + size // 2))
    yield from triangle(slice(middle, rows.stop), first + size // 2, least)


def tile(first: Tensor, last: Tensor, start: int, end: int) -> Iterator[Piece]:
    """Queries that see differently, with the keys that any of them sees."""
    lower, upper = first[start:end], last[start:end]
    if (sees := upper > lower).any():
        yield Piece(slice(start, end), slice(int(lower[sees].min()), int(upper[sees].max())), masked=True)


def tiled(found: Iterator[Piece], rows: int = ROWS, keys: int = KEYS) -> Iterator[Piece]:
    """Pieces cut into tiles, for kernels that hold the scores of all they are given."""
    for piece in found:
        for row in range(piece.rows.start, piece.rows.stop, rows):
            for key in range(piece.keys.start, piece.keys.stop, keys):
                limits = min(row + rows, piece.rows.stop), min(key + keys, piece.keys.stop)
                yield Piece(slice(row, limits[0]), slice(key, limits[1]), masked=piece.causal or piece.masked)


class Part(NamedTuple):
    """A piece of some sequences of the batch: which, its queries and keys among all, and what a kernel is told."""

    batch: slice
    rows: slice
    keys: slice
    block: Block


def parts(q: Tensor, k: Tensor, v: Tensor, given: Sequence) -> Iterator[Part]:
    """All that queries see of keys."""
    first, last, runs, terms, scale, score = given
    first, last = first.cpu(), last.cpu()
    found_runs = [(0, 0, k.shape[2])] if runs is None else joined(runs.tolist(), k.shape[2] // len(runs))
    whole = bool(score) or q.shape[-1] != v.shape[-1]
    least = TRIANGLES[0]
    while least**2 * q.shape[1] * (q.shape[-1] + v.shape[-1]) < LEAST_WORK:
        least *= 2
    for b in range(first.shape[0]):
        batch = slice(b, b + 1) if first.shape[0] > 1 else slice(0, q.shape[0])
        for near_start, start, held in found_runs:
            lower, upper = ((x[b] - start).clamp(0, held) for x in (first, last))
            seen = upper > lower
            bounds = [torch.where(seen, x, 0) for x in (lower, upper)]
            found = pieces(bounds[0], bounds[1], least=least)
            for piece in tiled(found) if whole else found:
                mask = _mask(piece, bounds[0], bounds[1], q) if piece.masked else None
                near = slice(near_start + piece.keys.start, near_start + piece.keys.stop)
                far = slice(start + piece.keys.start, start + piece.keys.stop)
                change = _change(score, terms, batch, piece.rows, far) if score else None
                yield Part(batch, piece.rows, near, Block(piece.causal, scale, mask, change))


def joined(starts: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """(first key among all, its position, how many) of runs of one size, which are joined where one follows another."""
    found: list[tuple[int, int, int]] = []
    for number, start in enumerate(starts):
        first, position, count = found[-1] if found else (0, -1, 0)
        if position + count == start and count:
            found[-1] = (first, position, count + size)
        else:
            found.append((number * size, start, size))
    return found


def _mask(piece: Piece, first: Tensor, last: Tensor, q: Tensor) -> Tensor:
    keys = torch.arange(piece.keys.start, piece.keys.stop)
    sees = (keys >= first[piece.rows, None]) & (keys < last[piece.rows, None])
    return torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, -torch.inf)[None, None].to(q.device)


def _change(score: str, terms: Sequence[Tensor], batch: slice, rows: slice, keys: slice) -> Callable[[Tensor], Tensor]:
    """The score function on one block of scores."""
    near = [x[batch if x.shape[0] > 1 else slice(None), :, rows if x.shape[2] > 1 else slice(None)] for x in terms]
    positions = torch.arange(keys.start, keys.stop)
    return lambda scores: evaluate(score, scores, positions.to(scores.device), near)


@torch.library.impl(library, "attend", "CPU")
@torch.library.impl(library, "attend", "CUDA")
def _attend(q: Tensor, k: Tensor, v: Tensor, *given) -> tuple[Tensor, Tensor]:
    kind = wide(q.dtype)
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=kind, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=kind, device=q.device)
    for batch, rows, keys, block in parts(q, k, v, given):
        found, level = kernels.forward(q[batch, :, rows], k[batch, :, keys], v[batch, :, keys], block)
        before = lse[batch, :, rows]
        after = torch.logaddexp(before, level)
        base = torch.where(after > -torch.inf, after, 0.0)
        kept = out[batch, :, rows].mul_((before - base).exp().unsqueeze(-1))
        kept.add_(found.to(kind) * (level - base).exp().unsqueeze(-1))
        lse[batch, :, rows] = after
    return out.to(q.dtype), lse


@torch.library.impl(library, "attend_backward", "CPU")
@torch.library.impl(library, "attend_backward", "CUDA")
def _attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given):
    kind = wide(q.dtype)
    found = [torch.zeros(x.shape, dtype=kind, device=q.device) for x in (q, k, v)]
    for batch, rows, keys, block in parts(q, k, v, given):
        here, near = (batch, slice(None), rows), (batch, slice(None), keys)
        given_here = (gradient[here], q[here], k[near], v[near], out[here], lse[here])
        for total, place, share in zip(found, (here, near, near), kernels.backward(*given_here, block), strict=True):
            total[place] += share
    return tuple(total.to(x.dtype) for total, x in zip(found, (q, k, v)))
