"""Products of matrices in pieces, beside the steps of a ring: what `async_tp` puts in place of a collective.

    y = all_gather(x) @ w           at step s a rank has the shard of the rank s places before it: its rows of y are
                                    computed while the next shard is on its way
    z = reduce_scatter(a @ w)       at step s a rank computes the rows of the rank s + 1 places after it, which travel
                                    there while the next are computed; its own come last, and what came is added

The same program on every rank: whose rows are at hand is data, the rank's coordinate on the axis. Padding of an uneven
dim travels as it is and is cut off after a gather; before a reduction it is added, zero. Terms are added in the dtype
of the collective, in the order of their steps.

Small pieces are slow, so products that share rows are one while they are small (`joins`): their matrices are laid side
by side, or where products are added, rows and matrices end to end.
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


@dataclass(frozen=True)
class Product:
    """A product of rows, `op(rows, *rest)`, its tensors beside the rows left open: a matrix, and scales in float8."""

    op: Any
    rest: tuple[Any, ...]

    @property
    def tensors(self) -> int:
        """How many tensors it takes beside the rows."""
        return self.rest.count(OPEN)

    def __call__(self, rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The product of a matrix of rows."""
        given = iter(tensors)
        return self.op(rows, *(next(given) if part is OPEN else part for part in self.rest))

    def of(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The same of rows along all dims but the last."""
        made = self(x.reshape(-1, x.shape[-1]), tensors)
        return made.view(*x.shape[:-1], made.shape[-1])


OPEN = ...
MM = Product(torch.ops.aten.mm.default, (OPEN,))
View = tuple[Any, tuple[int, ...]]  # an operator and the shape that it gives


def viewed(x: Tensor, view: View | None) -> Tensor:
    """A tensor in another shape."""
    return view[0](x, list(view[1])) if view else x


def joins(products: Sequence[Product], rows: int, matrices: Sequence[Tensor]) -> bool:
    """Whether products, of so many rows in a piece, are better made as one."""
    largest = max(2 * rows * matrix.numel() for matrix in matrices)
    return len(products) > 1 and set(products) == {MM} and largest < SMALL_FLOPS


def dealt(products: Sequence[Product], given: Sequence[Tensor], more: int = 0) -> list[Sequence[Tensor]]:
    """The tensors of each product, and so many beside them."""
    tensors = iter(given)
    return [list(islice(tensors, more + product.tensors)) for product in products]


@dataclass(frozen=True)
class GatherProducts:
    """Products of a gathered value, rows in one dim, and at the end with `whole` the value itself.

    `gather` are the arguments of `all_gather` after the shard; `flat` views the value as rows, None if it is.
    Takes the shard, the tensors of each product and the rank's coordinate.
    """

    gather: tuple[Any, ...]
    flat: View | None
    products: tuple[Product, ...]
    whole: bool
    name: ClassVar[str] = "ring_gather"

    def ring(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The products, in pieces."""
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
        """What it stands for."""
        whole = reshard.all_gather(x, *self.gather)
        left = viewed(whole, self.flat)
        made = [product(left, own) for product, own in zip(self.products, dealt(self.products, given))]
        return (*made, whole) if self.whole else tuple(made)


@dataclass(frozen=True)
class ScatterProducts:
    """The reduce-scattered sum of products.

    `scatter` are the arguments of `reduce_scatter` after the sum, `lead` its dims but for the last, `views` give each
    product these dims (None: it has them). Takes rows and tensors of each product, and the rank's coordinate.
    """

    scatter: tuple[Any, ...]
    lead: tuple[int, ...]
    products: tuple[Product, ...]
    views: tuple[View | None, ...]
    name: ClassVar[str] = "ring_scatter"

    def ring(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The sum, in pieces."""
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
        """What it stands for."""
        each = zip(self.products, self.views, dealt(self.products, given, 1))
        terms = [viewed(product(left, own), view) for product, view, (left, *own) in each]
        return (reshard.reduce_scatter(added(terms), *self.scatter),)


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum, from the first on."""
    return sum(terms[1:], terms[0])
