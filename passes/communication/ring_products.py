"""Products of matrices in pieces, each beside a step of a ring: what `async_tp` puts in place of a collective.

    y = all_gather(x) @ w           at step s a rank has the shard of the rank s places before it: its rows of y are
                                    computed while the next shard is on its way
    z = reduce_scatter(a @ w)       at step s a rank computes rows of the rank s + 1 places before it, and adds to
                                    them the sum that has come to it, which then travels on: the last are its own

The same on every rank: which rows are at hand is data, the rank's coordinate on the axis. Padding of an uneven dim
travels as it is and is cut off after a gather; before a reduce-scatter it is added, zero. Sums are rounded in the order
of the ring, in the dtype that the collective would add in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from passes.program import reshard
from passes.program.shift import arrive, shift


@dataclass(frozen=True)
class Rows:
    """A dim of tensors, not the last, of which each rank of an axis has `ceil(size / axis_size)` entries."""

    dim: int
    axis: str
    axis_size: int

    def ranks(self, axis_index: Tensor, before: int) -> Tensor:
        """The rank `before` places before this one, and those before that: i64[axis_size]."""
        places = torch.arange(before, before + self.axis_size, device=axis_index.device)
        return torch.remainder(axis_index - places, self.axis_size)

    def joined(self, shards: Sequence[Tensor], axis_index: Tensor, size: int) -> Tensor:
        """The whole of shards in the order in which a ring brings them, without padding."""
        by_rank = torch.stack(list(shards)).index_select(0, self.ranks(axis_index, 0))
        return by_rank.movedim(0, self.dim).flatten(self.dim, self.dim + 1).narrow(self.dim, 0, size)

    def apart(self, x: Tensor, axis_index: Tensor) -> Tensor:
        """The shards of a whole tensor in the order in which a ring adds them up, along a first dim of their own."""
        padded = reshard.pad(x, self.dim, self.axis_size).unflatten(self.dim, (self.axis_size, -1))
        return padded.movedim(self.dim, 0).index_select(0, self.ranks(axis_index, 1))

    def around(self, x: Tensor) -> Iterator[Tensor]:
        """The shards of all ranks, the own one first; the next is on its way while one is used."""
        for step in range(self.axis_size):
            coming = shift(x, self.axis, 1) if step + 1 < self.axis_size else None
            yield x
            x = x if coming is None else arrive(coming, x)

    def added(self, terms: Iterator[Tensor]) -> Tensor:
        """The sum over ranks of this one's shard; a term is computed while the sum of those before travels."""
        total = next(terms)
        for _ in range(self.axis_size - 1):
            coming = shift(total, self.axis, 1)
            term = next(terms)
            total = term + arrive(coming, total)
        return total


@dataclass(frozen=True)
class GatherProducts:
    """Products of a gathered value with matrices, rows in one dim, and at the end with `whole` the value itself.

    `gather` are the arguments of `all_gather` after the shard, `flat` whether rows are several dims of it.
    """

    gather: tuple[Any, ...]
    flat: bool
    whole: bool
    name: ClassVar[str] = "ring_gather"

    def ring(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The products, in pieces."""
        *matrices, axis_index = given
        dim, axis, axis_size, size, dtype, _ = self.gather
        rows, shards = Rows(dim, axis, axis_size), list[Tensor]()
        pieces: list[list[Tensor]] = [[] for _ in matrices]
        for shard in rows.around(x.to(dtype).contiguous()):
            shards.append(shard)
            for own, matrix in zip(pieces, matrices):
                own.append(product(shard, matrix))
        made = [rows.joined(own, axis_index, size).flatten(0, -2) for own in pieces]
        return (*made, rows.joined(shards, axis_index, size)) if self.whole else tuple(made)

    def meaning(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """What it stands for."""
        whole = reshard.all_gather(x, *self.gather)
        left = whole.view(math.prod(whole.shape[:-1]), whole.shape[-1]) if self.flat else whole
        made = tuple(torch.mm(left, matrix) for matrix in given[:-1])
        return (*made, whole) if self.whole else made


@dataclass(frozen=True)
class ScatterProducts:
    """The reduce-scattered sum of products, given as rows and matrix of each in turn.

    `scatter` are the arguments of `reduce_scatter` after the sum, `lead` its dims but for the last, `views` give each
    product these dims (None: it has them).
    """

    scatter: tuple[Any, ...]
    lead: tuple[int, ...]
    views: tuple[Callable[..., Tensor] | None, ...]
    name: ClassVar[str] = "ring_scatter"

    def ring(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The sum, in pieces."""
        *factors, axis_index = given
        dim, axis, axis_size, dtype, reduce_dtype = self.scatter
        rows = Rows(dim, axis, axis_size)
        lefts = [rows.apart(left.view(*self.lead, left.shape[-1]), axis_index) for left in factors[::2]]

        def terms() -> Iterator[Tensor]:
            for step in range(axis_size):
                found = [product(left.select(0, step), m) for left, m in zip(lefts, factors[1::2])]
                term = sum(found[1:], found[0])
                yield term.to(reduce_dtype or term.dtype)

        return (rows.added(terms()).to(dtype),)

    def meaning(self, *given: Tensor) -> tuple[Tensor, ...]:
        """What it stands for."""
        terms = []
        for left, matrix, view in zip(given[:-1:2], given[1:-1:2], self.views):
            made = torch.mm(left, matrix)
            terms.append(view(made, [*self.lead, made.shape[-1]]) if view else made)
        return (reshard.reduce_scatter(sum(terms[1:], terms[0]), *self.scatter),)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """The rows of `x`, along all dims but the last, times a matrix."""
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], matrix.shape[-1])
