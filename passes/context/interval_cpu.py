"""Attention by interval on the CPU: only the blocks that some query sees, each by an attention kernel.

Time and memory follow the number of visible pairs, and no full mask is ever in memory. The eager backend runs the same
code on CUDA, where it waits for the bounds.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from passes.context import kernels
from passes.context.kernels import Block, wide_dtype
from passes.ops.attend import evaluate, library

ROWS, KEYS = 128, 4096  # largest tile with a mask of its own
FEW = 48  # fewer queries with a common interval than this are not worth a call of their own
TRIANGLE = 2047  # triangles of up to so many rows are cut into strips: flash attention computes all pairs of small ones
ENOUGH = 2**25  # pairs times heads times widths: enough work to hide the cost of a call


class Tile(NamedTuple):
    """Queries over one range of keys: full, causal (each row sees one key fewer than the next), or by bounds."""

    rows: slice
    keys: slice
    causal: bool = False
    masked: bool = False


def pieces(first: Tensor, last: Tensor, largest: int = TRIANGLE) -> Iterator[Tile]:
    """Yield disjoint tiles that cover all keys of one run that queries see, within bounds `first` and `last`, i64[s].

    Triangles of up to `largest` rows are cut into strips.
    """
    rows, start, mixed = len(first), 0, 0  # queries from `mixed` on wait for a common tile
    rise = last.diff()
    kinds = torch.where(first.diff() == 0, torch.where(rise == 0, 1, torch.where(rise == 1, 2, 0)), 0)
    turns = iter([*(torch.nonzero(kinds.diff()).flatten() + 1).tolist(), len(kinds)])
    turn = 0
    while start < rows:
        while turn <= start < len(kinds):
            turn = next(turns)
        kind = int(kinds[start]) if start < len(kinds) else 0  # the next query's keys; 1: the same, 2: one more
        end = turn + 1 if kind else start + 1
        if end - start >= FEW:
            yield from tile(first, last, mixed, start)
            yield from alike_rows(slice(start, end), int(first[start]), int(last[start]), kind == 2, largest)
            mixed = end
        elif end - mixed > ROWS:
            yield from tile(first, last, mixed, start)
            mixed = start
        start = end
    yield from tile(first, last, mixed, rows)


def alike_rows(rows: slice, first: int, last: int, rises: bool, largest: int) -> Iterator[Tile]:
    """Yield tiles of queries with one first key, whose last key is the same or rises by one from query to query."""
    if not rises:
        if last > first:
            yield Tile(rows, slice(first, last))
        return
    if last <= first:  # the first queries see nothing
        rows, last = slice(rows.start + first + 1 - last, rows.stop), first + 1
    if last - 1 > first:
        yield Tile(rows, slice(first, last - 1))
    yield from triangle(rows, last - 1, largest)


def triangle(rows: slice, first: int, largest: int) -> Iterator[Tile]:
    """Yield a triangle, uncut or in strips: queries that see keys from `first` on, each one more than the last."""
    size = rows.stop - rows.start
    for start in range(0, size, ROWS if size <= largest else size):
        end = min(start + ROWS, size) if size <= largest else size
        yield Tile(slice(rows.start + start, rows.start + end), slice(first, first + end), causal=True)


def tile(first: Tensor, last: Tensor, start: int, end: int) -> Iterator[Tile]:
    """Yield one tile of queries with different bounds, over the keys that any of them sees."""
    lower, upper = first[start:end], last[start:end]
    if (sees := upper > lower).any():
        yield Tile(slice(start, end), slice(int(lower[sees].min()), int(upper[sees].max())), masked=True)


def cut_into_tiles(tiles: Iterator[Tile], rows: int = ROWS, keys: int = KEYS) -> Iterator[Tile]:
    """Cut pieces into tiles, for kernels that hold the scores of their whole input."""
    for piece in tiles:
        for row in range(piece.rows.start, piece.rows.stop, rows):
            for key in range(piece.keys.start, piece.keys.stop, keys):
                limits = min(row + rows, piece.rows.stop), min(key + keys, piece.keys.stop)
                yield Tile(slice(row, limits[0]), slice(key, limits[1]), masked=piece.causal or piece.masked)


class Part(NamedTuple):
    """A piece of some sequences: index of its run, batch entries, queries, and keys as indices into all keys."""

    run: int
    batch: slice
    rows: slice
    keys: slice
    causal: bool
    options: Block | None  # kernel options, if they differ between parts of one size

    def query_index(self) -> tuple[slice, slice, slice]:
        return self.batch, slice(None), self.rows

    def key_index(self) -> tuple[slice, slice, slice]:
        return self.batch, slice(None), self.keys


def calls(q: Tensor, k: Tensor, v: Tensor, arguments: Sequence) -> Iterator[tuple[list[Part], Block]]:
    """Yield the kernel calls: parts of one size that share no query, with the kernel's options."""
    waiting: dict[tuple[int, int, int, bool], list[Part]] = defaultdict(list)
    for part in parts(q, k, v, arguments):
        if part.options:
            yield [part], part.options
            continue
        rows, keys = part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
        kind = part.run, rows, keys, part.causal
        if any((other.batch, other.rows) == (part.batch, part.rows) for other in waiting[kind]):
            yield waiting.pop(kind), _shared_options(rows, keys, part.causal, arguments[4], q)
        waiting[kind].append(part)
        if len(waiting[kind]) * rows * keys * q.shape[1] * (q.shape[-1] + v.shape[-1]) >= ENOUGH:
            yield waiting.pop(kind), _shared_options(rows, keys, part.causal, arguments[4], q)
    for (_, rows, keys, causal), group in waiting.items():
        yield group, _shared_options(rows, keys, causal, arguments[4], q)


def parts(q: Tensor, k: Tensor, v: Tensor, arguments: Sequence) -> Iterator[Part]:
    """Yield all parts: together they cover every pair of a query and a key that it sees."""
    first, last, runs, terms, scale, score = arguments
    first, last = first.cpu(), last.cpu()
    key_runs = [(0, 0, k.shape[2])] if runs is None else merge_runs(runs.tolist(), k.shape[2] // len(runs))
    plain = bool(score) or kernels.is_plain(q, v)
    largest = k.shape[2] if plain else TRIANGLE if q.device.type == "cpu" else 0
    for b, (run, (first_key, start, count)) in itertools.product(range(first.shape[0]), enumerate(key_runs)):
        batch = slice(b, b + 1) if first.shape[0] > 1 else slice(0, q.shape[0])
        lower, upper = ((x[b] - start).clamp(0, count) for x in (first, last))
        visible = upper > lower
        bounds = [torch.where(visible, x, 0) for x in (lower, upper)]
        tiles = pieces(bounds[0], bounds[1], largest)
        for piece in cut_into_tiles(tiles) if plain else tiles:
            key_slice = slice(first_key + piece.keys.start, first_key + piece.keys.stop)
            position_slice = slice(start + piece.keys.start, start + piece.keys.stop)
            change = _change(score, terms, batch, piece.rows, position_slice) if score else None
            mask = _mask(piece, bounds[0], bounds[1], q) if piece.masked else None
            options = Block(scale=scale, mask=mask, change=change) if piece.masked or score else None
            yield Part(run, batch, piece.rows, key_slice, piece.causal, options)


def merge_runs(starts: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """Return (index of the first key, its position, number of keys) of runs of one size; adjacent runs are merged."""
    merged: list[tuple[int, int, int]] = []
    for number, start in enumerate(starts):
        first, position, count = merged[-1] if merged else (0, -1, 0)
        if position + count == start and count:
            merged[-1] = (first, position, count + size)
        else:
            merged.append((number * size, start, size))
    return merged


def _shared_options(rows: int, keys: int, causal: bool, scale: float | None, q: Tensor) -> Block:
    """Return kernel options if all queries see all keys, or the last one all and each one before it a key fewer."""
    if not causal or rows == keys:
        return Block(causal, scale)
    return Block(scale=scale, mask=_end_of_causal(rows, keys, q.dtype, q.device))


@functools.lru_cache(maxsize=32)
def _end_of_causal(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of the last rows of a triangle."""
    return torch.zeros(rows, keys, dtype=dtype, device=device).masked_fill_(
        torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1), -torch.inf
    )[None, None]


def _mask(piece: Tile, first: Tensor, last: Tensor, q: Tensor) -> Tensor:
    keys = torch.arange(piece.keys.start, piece.keys.stop)
    sees = (keys >= first[piece.rows, None]) & (keys < last[piece.rows, None])
    return torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, -torch.inf)[None, None].to(q.device)


def _change(score: str, terms: Sequence[Tensor], batch: slice, rows: slice, keys: slice) -> Callable[[Tensor], Tensor]:
    """Return the score function applied to one block of scores."""
    local_terms = [
        x[batch if x.shape[0] > 1 else slice(None), :, rows if x.shape[2] > 1 else slice(None)] for x in terms
    ]
    positions = torch.arange(keys.start, keys.stop)
    return lambda scores: evaluate(score, scores, positions.to(scores.device), local_terms)


def _stacked(x: Tensor, places: Sequence[tuple[slice, ...]]) -> Tensor:
    """Concatenate slices of one size along the batch dim."""
    return x[places[0]] if len(places) == 1 else torch.cat([x[place] for place in places])


@torch.library.impl(library, "attend", "CPU")
@torch.library.impl(library, "attend", "CUDA")
def _attend(q: Tensor, k: Tensor, v: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    kind = wide_dtype(q.dtype)
    out = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=kind, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=kind, device=q.device)
    for group, block in calls(q, k, v, arguments):
        query_slices, key_slices = [part.query_index() for part in group], [part.key_index() for part in group]
        block_out, block_lse = kernels.forward(
            _stacked(q, query_slices), _stacked(k, key_slices), _stacked(v, key_slices), block
        )
        before = _stacked(lse, query_slices)
        if (before > -torch.inf).any():
            block_out, block_lse = kernels.merge((_stacked(out, query_slices), before), (block_out.to(kind), block_lse))
        for place, x, y in zip(
            query_slices, block_out.chunk(len(query_slices)), block_lse.chunk(len(query_slices)), strict=True
        ):
            out[place], lse[place] = x, y
    return out.to(q.dtype), lse


@torch.library.impl(library, "attend_backward", "CPU")
@torch.library.impl(library, "attend_backward", "CUDA")
def _attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments):
    kind = wide_dtype(q.dtype)
    totals = [torch.zeros(x.shape, dtype=kind, device=q.device) for x in (q, k, v)]
    for group, block in calls(q, k, v, arguments):
        query_slices, key_slices = [part.query_index() for part in group], [part.key_index() for part in group]
        keys, values = _stacked(k, key_slices), _stacked(v, key_slices)
        gradients = kernels.backward(
            _stacked(gradient, query_slices),
            _stacked(q, query_slices),
            keys,
            values,
            _stacked(out, query_slices),
            _stacked(lse, query_slices),
            block,
        )
        for total, places, shares in zip(totals, (query_slices, key_slices, key_slices), gradients, strict=True):
            for place, share in zip(places, shares.chunk(len(places)), strict=True):
                total[place] += share
    return tuple(total.to(x.dtype) for total, x in zip(totals, (q, k, v)))
