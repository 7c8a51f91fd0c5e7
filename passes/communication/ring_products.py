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

from passes.program import reshard
from passes.program.shift import arrive, shift

SMALL_FLOPS = 5e10  # below it a larger matmul saves more than concatenating costs (conf/cluster/rates/h100.yaml)


@dataclass(frozen=True)
class Rows:
    """A dim of tensors, not the last, of which each rank of an axis has `ceil(size / axis_size)` entries."""

    dim: int
    axis: str
    axis_size: int

    def around(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the shards of all ranks, own shard first; the next is on its way while one is used."""
        for step in range(self.axis_size):
            coming = shift(x, self.axis, 1) if step + 1 < self.axis_size else None
            yield x
            x = x if coming is None else arrive(coming, x)

    def joined(self, shards: Sequence[Tensor], axis_index: Tensor, size: int) -> Tensor:
        """Concatenate shards that came around to the full tensor, without padding."""
        steps = torch.remainder(axis_index - self.places(axis_index), self.axis_size)
        by_rank = torch.stack(list(shards)).index_select(0, steps)
        shape = [*by_rank.shape[1 : self.dim + 1], -1, *by_rank.shape[self.dim + 2 :]]
        return by_rank.movedim(0, self.dim).reshape(shape).narrow(self.dim, 0, size)

    def apart(self, x: Tensor, axis_index: Tensor) -> Tensor:
        """Split a full tensor into shards along a new first dim: that of the next rank first, the own one last."""
        ranks = torch.remainder(axis_index + 1 + self.places(axis_index), self.axis_size)
        padded = reshard.pad(x, self.dim, self.axis_size).unflatten(self.dim, (self.axis_size, -1))
        return padded.movedim(self.dim, 0).index_select(0, ranks)

    def exchanged(self, term: Callable[[int], Tensor]) -> list[Tensor]:
        """Return the terms that all ranks have for this rank, its own last.

        `term(step)` is for the rank `step + 1` positions later, and is computed while the term before it travels.
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
        """Return 0, 1, ... for the ranks of the axis."""
        return torch.arange(self.axis_size, device=like.device)


@dataclass(frozen=True)
class Product:
    """A matmul of rows, `op(rows, *rest)`.

    Its tensors other than the rows are left open: a matrix, and scales in float8.
    """

    op: Any
    rest: tuple[Any, ...]

    @property
    def tensors(self) -> int:
        """The number of tensors that it takes in addition to the rows."""
        return self.rest.count(OPEN)

    def __call__(self, rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matmul of a matrix of rows."""
        given = iter(tensors)
        return self.op(rows, *(next(given) if part is OPEN else part for part in self.rest))

    def of(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matmul of rows along all dims but the last."""
        made = self(x.reshape(-1, x.shape[-1]), tensors)
        return made.view(*x.shape[:-1], made.shape[-1])


OPEN = ...
MM = Product(torch.ops.aten.mm.default, (OPEN,))
View = tuple[Any, tuple[int, ...]]  # an operator and its result's shape


def viewed(x: Tensor, view: View | None) -> Tensor:
    """Return a tensor in another shape."""
    return view[0](x, list(view[1])) if view else x


def joins(products: Sequence[Product], rows: int, matrices: Sequence[Tensor]) -> bool:
    """Return True if matmuls with that many rows in a piece are faster as one."""
    largest = max(2 * rows * matrix.numel() for matrix in matrices)
    return len(products) > 1 and set(products) == {MM} and largest < SMALL_FLOPS


def dealt(products: Sequence[Product], given: Sequence[Tensor], more: int = 0) -> list[Sequence[Tensor]]:
    """Return the tensors of each matmul, after `more` others."""
    tensors = iter(given)
    return [list(islice(tensors, more + product.tensors)) for product in products]


@dataclass(frozen=True)
class GatherProducts:
    """Matmuls of a gathered value, rows in one dim, and with `whole` also the value itself at the end.

    `gather` are the arguments of `all_gather` after the shard; `flat` views the value as rows, None if it has two dims.
    Takes the shard, the tensors of each matmul and the rank's coordinate.
    """

    gather: tuple[Any, ...]
    flat: View | None
    products: tuple[Product, ...]
    whole: bool
    name: ClassVar[str] = "ring_gather"

    def ring(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Compute the matmuls in pieces."""
        *tensors, axis_index = given
        dim, axis, axis_size, size, dtype, _ = self.gather
        rows, products, factors = Rows(dim, axis, axis_size), self.products, dealt(self.products, tensors)
        one = joins(products, math.prod(x.shape[:-1]), [own[0] for own in factors])
        if one:
            products, factors = (MM,), [[torch.cat(tensors, 1)]]
        shards, pieces = list[Tensor](), [list[Tensor]() for _ in products]
        for sent in rows.around(reshard.sendable(x.to(dtype).contiguous())):
            shards.append(sent)
            for found, product, own in zip(pieces, products, factors):
                found.append(product.of(reshard.received(sent, dtype), own))
        made = [rows.joined(found, axis_index, size).reshape(-1, found[0].shape[-1]) for found in pieces]
        made = list(made[0].split([matrix.shape[1] for matrix in tensors], 1)) if one else made
        whole = [reshard.received(rows.joined(shards, axis_index, size), dtype)] if self.whole else []
        return (*made, *whole)

    def meaning(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Compute the operators that it stands for."""
        whole = reshard.all_gather(x, *self.gather)
        left = viewed(whole, self.flat)
        made = [product(left, own) for product, own in zip(self.products, dealt(self.products, given))]
        return (*made, whole) if self.whole else tuple(made)


@dataclass(frozen=True)
class ScatterProducts:
    """The reduce-scattered sum of matmuls.

    `scatter` are the arguments of `reduce_scatter` after the sum, `lead` its dims except the last; `views` give each
    matmul these dims (None: it has them). Takes rows and tensors of each matmul, and the rank's coordinate.
    """

    scatter: tuple[Any, ...]
    lead: tuple[int, ...]
    products: tuple[Product, ...]
    views: tuple[View | None, ...]
    name: ClassVar[str] = "ring_scatter"

    def ring(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Compute the sum in pieces."""
        *tensors, axis_index = given
        dim, axis, axis_size, dtype, reduce_dtype = self.scatter
        rows, products = Rows(dim, axis, axis_size), self.products
        each = dealt(products, tensors, 1)
        lefts, factors = [x.view(*self.lead, x.shape[-1]) for x, *_ in each], [own for _, *own in each]
        if joins(products, -(-math.prod(self.lead) // axis_size), [own[0] for own in factors]):
            products = (MM,)
            lefts, factors = [torch.cat(lefts, -1)], [[torch.cat([own[0] for own in factors], 0)]]
        pieces = [reshard.received(rows.apart(reshard.sendable(x), axis_index), x.dtype) for x in lefts]

        def term(step: int) -> Tensor:
            made = added([p.of(x.select(0, step), own) for p, x, own in zip(products, pieces, factors)])
            return made.to(reduce_dtype or made.dtype)

        return (added(rows.exchanged(term)).to(dtype),)

    def meaning(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Compute the operators that it stands for."""
        each = zip(self.products, self.views, dealt(self.products, given, 1))
        terms = [viewed(product(left, own), view) for product, view, (left, *own) in each]
        return (reshard.reduce_scatter(added(terms), *self.scatter),)


def added(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum, added from the first term on."""
    return sum(terms[1:], terms[0])
