"""Matmuls in pieces, next to the steps of a ring: the operators that `async_tp` puts in place of a collective.

    y = all_gather(x) @ w           at step s a rank has the shard of the rank s positions earlier: its rows of y are
                                    computed while the next shard is on its way
    z = reduce_scatter(a @ w)       at step s a rank computes the rows of the rank s + 1 positions later, and sends them
                                    while the next are computed; its own come last, and received rows are added

All ranks run the same program: the rank's coordinate on the axis is an input. Padding of an uneven dim travels with it
and is cut off after a gather; before a reduction zeros are padded. Terms are added in the dtype of the collective, in
the order of their steps.

Small pieces are slow, so small matmuls that share rows are merged (`joins`): their matrices are concatenated, or, if
the matmuls are added, their rows and matrices along the contracted dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from passes.ops import reshard
from passes.ops.shift import arrive, shift

SMALL_FLOPS = 5e10  # below it a larger matmul saves more than concatenating costs (conf/cluster/rates/h100.yaml)


@dataclass(frozen=True)
class Rows:
    """A dim of tensors, not the last, of which each rank of an axis has `ceil(size / axis_size)` entries."""

    dim: int
    axis: str
    axis_size: int

    def all_shards(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the shards of all ranks, own shard first; the next is on its way while one is used."""
        for step in range(self.axis_size):
            incoming = shift(x, self.axis, 1) if step + 1 < self.axis_size else None
            yield x
            x = x if incoming is None else arrive(incoming, x)

    def concatenate(self, shards: Sequence[Tensor], axis_index: Tensor, size: int) -> Tensor:
        """Concatenate shards that came around to the full tensor, without padding."""
        steps = torch.remainder(axis_index - self.places(axis_index), self.axis_size)
        by_rank = torch.stack(list(shards)).index_select(0, steps)
        shape = [*by_rank.shape[1 : self.dim + 1], -1, *by_rank.shape[self.dim + 2 :]]
        return by_rank.movedim(0, self.dim).reshape(shape).narrow(self.dim, 0, size)

    def split_shards(self, x: Tensor, axis_index: Tensor) -> Tensor:
        """Split a full tensor into shards along a new first dim: that of the next rank first, the own one last."""
        ranks = torch.remainder(axis_index + 1 + self.places(axis_index), self.axis_size)
        padded = reshard.pad(x, self.dim, self.axis_size).unflatten(self.dim, (self.axis_size, -1))
        return padded.movedim(self.dim, 0).index_select(0, ranks)

    def exchange(self, term: Callable[[int], Tensor]) -> list[Tensor]:
        """Return the terms that all ranks have for this rank, its own last.

        `term(step)` is for the rank `step + 1` positions later, and is computed while the term before it travels.
        """
        received, sent, incoming = list[Tensor](), None, None
        for step in range(self.axis_size):
            last_term = term(step)
            if incoming is not None:
                received.append(arrive(incoming, sent))
            if step + 1 < self.axis_size:
                sent, incoming = last_term, shift(last_term, self.axis, step + 1)
        return [*received, last_term]

    def places(self, like: Tensor) -> Tensor:
        """Return 0, 1, ... for the ranks of the axis."""
        return torch.arange(self.axis_size, device=like.device)


@dataclass(frozen=True)
class Matmul:
    """A matmul of rows, `op(rows, *operands)`.

    Its tensors other than the rows are left open: a matrix, and scales in float8.
    """

    op: Any
    operands: tuple[Any, ...]

    @property
    def tensor_count(self) -> int:
        """The number of tensors that it takes in addition to the rows."""
        return self.operands.count(OPEN)

    def __call__(self, rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matmul of a matrix of rows."""
        values = iter(tensors)
        return self.op(rows, *(next(values) if operand is OPEN else operand for operand in self.operands))

    def apply(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matmul of rows along all dims but the last."""
        result = self(x.reshape(-1, x.shape[-1]), tensors)
        return result.view(*x.shape[:-1], result.shape[-1])


OPEN = ...
MM = Matmul(torch.ops.aten.mm.default, (OPEN,))
View = tuple[Any, tuple[int, ...]]  # an operator and its result's shape


def apply_view(x: Tensor, view: View | None) -> Tensor:
    """Return a tensor in another shape."""
    return view[0](x, list(view[1])) if view else x


def joins(matmuls: Sequence[Matmul], rows: int, matrices: Sequence[Tensor]) -> bool:
    """Return True if matmuls with that many rows in a piece are faster as one."""
    largest = max(2 * rows * matrix.numel() for matrix in matrices)
    return len(matmuls) > 1 and set(matmuls) == {MM} and largest < SMALL_FLOPS


def split_tensors(matmuls: Sequence[Matmul], values: Sequence[Tensor], more: int = 0) -> list[Sequence[Tensor]]:
    """Return the tensors of each matmul, after `more` others."""
    tensors = iter(values)
    return [list(islice(tensors, more + matmul.tensor_count)) for matmul in matmuls]


@dataclass(frozen=True)
class GatherMatmuls:
    """Matmuls of a gathered value, rows in one dim, and with `keep_gathered` also the value itself at the end.

    `gather` are the arguments of `all_gather` after the shard; `flat` views the value as rows, None if it has two dims.
    Takes the shard, the tensors of each matmul and the rank's coordinate.
    """

    gather: tuple[Any, ...]
    flat: View | None
    matmuls: tuple[Matmul, ...]
    keep_gathered: bool
    name: ClassVar[str] = "ring_gather"

    def ring(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        """Compute the matmuls in pieces."""
        *tensors, axis_index = operands
        dim, axis, axis_size, size, dtype, _ = self.gather
        rows, matmuls, factors = Rows(dim, axis, axis_size), self.matmuls, split_tensors(self.matmuls, tensors)
        merged = joins(matmuls, math.prod(x.shape[:-1]), [factor[0] for factor in factors])
        if merged:
            matmuls, factors = (MM,), [[torch.cat(tensors, 1)]]
        shards, pieces = list[Tensor](), [list[Tensor]() for _ in matmuls]
        for sent in rows.all_shards(reshard.sendable(x.to(dtype).contiguous())):
            shards.append(sent)
            for terms, matmul, factor in zip(pieces, matmuls, factors):
                terms.append(matmul.apply(reshard.received(sent, dtype), factor))
        results = [rows.concatenate(terms, axis_index, size).reshape(-1, terms[0].shape[-1]) for terms in pieces]
        results = list(results[0].split([matrix.shape[1] for matrix in tensors], 1)) if merged else results
        gathered = [reshard.received(rows.concatenate(shards, axis_index, size), dtype)] if self.keep_gathered else []
        return (*results, *gathered)

    def meaning(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        """Compute the operators that it stands for."""
        gathered = reshard.all_gather(x, *self.gather)
        left = apply_view(gathered, self.flat)
        results = [matmul(left, factor) for matmul, factor in zip(self.matmuls, split_tensors(self.matmuls, operands))]
        return (*results, gathered) if self.keep_gathered else tuple(results)


@dataclass(frozen=True)
class ScatterMatmuls:
    """The reduce-scattered sum of matmuls.

    `scatter` are the arguments of `reduce_scatter` after the sum, `lead` its dims except the last; `views` give each
    matmul these dims (None: it has them). Takes rows and tensors of each matmul, and the rank's coordinate.
    """

    scatter: tuple[Any, ...]
    lead: tuple[int, ...]
    matmuls: tuple[Matmul, ...]
    views: tuple[View | None, ...]
    name: ClassVar[str] = "ring_scatter"

    def ring(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Compute the sum in pieces."""
        *tensors, axis_index = operands
        dim, axis, axis_size, dtype, reduce_dtype = self.scatter
        rows, matmuls = Rows(dim, axis, axis_size), self.matmuls
        split = split_tensors(matmuls, tensors, 1)
        lefts, factors = [x.view(*self.lead, x.shape[-1]) for x, *_ in split], [factor for _, *factor in split]
        if joins(matmuls, -(-math.prod(self.lead) // axis_size), [factor[0] for factor in factors]):
            matmuls = (MM,)
            lefts, factors = [torch.cat(lefts, -1)], [[torch.cat([factor[0] for factor in factors], 0)]]
        pieces = [reshard.received(rows.split_shards(reshard.sendable(x), axis_index), x.dtype) for x in lefts]

        def term(step: int) -> Tensor:
            total = add_terms([p.apply(x.select(0, step), factor) for p, x, factor in zip(matmuls, pieces, factors)])
            return total.to(reduce_dtype or total.dtype)

        return (add_terms(rows.exchange(term)).to(dtype),)

    def meaning(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Compute the operators that it stands for."""
        split = zip(self.matmuls, self.views, split_tensors(self.matmuls, operands, 1))
        terms = [apply_view(matmul(left, factor), view) for matmul, view, (left, *factor) in split]
        return (reshard.reduce_scatter(add_terms(terms), *self.scatter),)


def add_terms(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum, added from the first term on."""
    return sum(terms[1:], terms[0])
