"""Products of matrices in pieces, beside the steps of a ring: what `async_tp` puts in place of a collective.

    y = all_gather(x) @ w           at step s a rank has the shard of the rank s places before it: its rows of y are
                                    computed while the next shard is on its way
    z = reduce_scatter(a @ w)       at step s a rank computes the rows of the rank s + 1 places after it, which travel
                                    there while the next are computed; its own come last, and what came is added

The same program on every rank: whose rows are at hand is data, the rank's coordinate on the axis. Padding of an uneven
dim travels as it is and is cut off after a gather; before a reduction it is added, zero. Terms are added in the dtype in
which the collective would, in the order of their steps.

Small pieces are slow, so products that share rows are one while they are small (`joins`): their matrices are laid side
by side, or where products are added, rows and matrices end to end.
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

SMALL_FLOPS = 5e10  # below it larger products are faster by more than joining costs (conf/cluster/rates/h100.yaml)


@dataclass(frozen=True)
class Rows:
    """A dim of tensors, not the last, of which each rank of an axis has `ceil(size / axis_size)` entries."""

    dim: int
    axis: str
    axis_size: int

    def around(self, x: Tensor) -> Iterator[Tensor]:
        """The shards of all ranks, the own one first; the next is on its way while one is used."""
        for step in range(self.axis_size):
            coming = shift(x, self.axis, 1) if step + 1 < self.axis_size else None
            yield x
            x = x if coming is None else arrive(coming, x)

    def joined(self, shards: Sequence[Tensor], axis_index: Tensor, size: int) -> Tensor:
        """The whole of shards that came around, without padding."""
        steps = torch.remainder(axis_index - self.places(axis_index), self.axis_size)
        by_rank = torch.stack(list(shards)).index_select(0, steps)
        shape = [*by_rank.shape[1 : self.dim + 1], -1, *by_rank.shape[self.dim + 2 :]]
        return by_rank.movedim(0, self.dim).reshape(shape).narrow(self.dim, 0, size)

    def apart(self, x: Tensor, axis_index: Tensor) -> Tensor:
        """The shards of a whole tensor, in a first dim of their own: that of the next rank first, the own one last."""
        ranks = torch.remainder(axis_index + 1 + self.places(axis_index), self.axis_size)
        padded = reshard.pad(x, self.dim, self.axis_size).unflatten(self.dim, (self.axis_size, -1))
        return padded.movedim(self.dim, 0).index_select(0, ranks)

    def exchanged(self, term: Callable[[int], Tensor]) -> list[Tensor]:
        """What each rank has for this one, its own last.

        `term(step)` is for the rank `step + 1` places on, and is computed while the one before travels.
        """
        found, sent, coming = list[Tensor](), None, None
        for step in range(self.axis_size):
            made = term(step)
            if coming is not None:
                found.append(arrive(coming, sent))
            if step + 1 < self.axis_size:
                sent, coming = made, shift(made, self.axis, step + 1)
        return [*found, made]

    def places(self, like: Tensor) -> Tensor:
        """0, 1, ... for the ranks of the axis."""
        return torch.arange(self.axis_size, device=like.device)

    def flops(self, rows: int, matrix: Tensor) -> int:
        """Of a piece of a product of so many rows."""
        return 2 * -(-rows // self.axis_size) * matrix.numel()


def joins(rows: Rows, count: int, matrices: Sequence[Tensor]) -> bool:
    """Whether products with a matrix each, of so many rows in all pieces, are better made as one."""
    return len(matrices) > 1 and max(rows.flops(count, matrix) for matrix in matrices) < SMALL_FLOPS


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
        rows, widths = Rows(dim, axis, axis_size), [matrix.shape[1] for matrix in matrices]
        one = joins(rows, axis_size * math.prod(x.shape[:-1]), matrices)
        factors, shards = [torch.cat(matrices, 1)] if one else matrices, list[Tensor]()
        pieces: list[list[Tensor]] = [[] for _ in factors]
        for shard in rows.around(x.to(dtype).contiguous()):
            shards.append(shard)
            for own, factor in zip(pieces, factors):
                own.append(product(shard, factor))
        made = [rows.joined(own, axis_index, size).reshape(-1, own[0].shape[-1]) for own in pieces]
        made = list(made[0].split(widths, 1)) if one else made
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
        lefts, matrices = [x.view(*self.lead, x.shape[-1]) for x in factors[::2]], factors[1::2]
        if joins(rows, math.prod(self.lead), matrices):
            lefts, matrices = [torch.cat(lefts, -1)], [torch.cat(matrices, 0)]
        pieces = [rows.apart(left, axis_index) for left in lefts]

        def term(step: int) -> Tensor:
            made = added([product(x.select(0, step), matrix) for x, matrix in zip(pieces, matrices)])
            return made.to(reduce_dtype or made.dtype)

        return (added(rows.exchanged(term)).to(dtype),)

    def meaning(self, *given: Tensor) -> tuple[Tensor, ...]:
        """What it stands for."""
        terms = []
        for left, matrix, view in zip(given[:-1:2], given[1:-1:2], self.views):
            made = torch.mm(left, matrix)
            terms.append(view(made, [*self.lead, made.shape[-1]]) if view else made)
        return (reshard.reduce_scatter(added(terms), *self.scatter),)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """The rows of `x`, along all dims but the last, times a matrix."""
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix).view(*x.shape[:-1], matrix.shape[-1])


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum, from the first on."""
    return sum(terms[1:], terms[0])
