"""Random operators as functions of a seed, so that every mesh draws the same numbers.

    bernoulli(x, 0.9)                      ->   uniform(x, seed, 3) < 0.9
    randn([4, 6])                          ->   sqrt(-2 log(1 - uniform(x, seed, 3))) * cos(2 pi uniform(x, seed, -5))
    attention(q, k, v, dropout_p=0.1)      ->   dropout(softmax(q k^T), 0.1, seed, 3) v      as its record says

The numbers are not those of PyTorch's generator. `KEYED` maps an operator to a function of the seed, the site (which
counts the random operators of a graph) and the operator's own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.context.operators import OPERATORS
from passes.ir.operators import key_of, name_of
from passes.sharding.random import dropout, uniform


def draw_like(x: Tensor, seed: Tensor, site: int) -> Tensor:
    """Draw numbers in [0, 1) in the shape and dtype of x."""
    return uniform(x, seed, site).to(x.dtype)


def bernoulli(seed: Tensor, site: int, x: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    """Draw ones with probability `p` (None: with the probabilities in x), and zeros otherwise."""
    return (uniform(x, seed, site) < (x if p is None else p)).to(x.dtype)


def exponential(seed: Tensor, site: int, x: Tensor, lambd: float = 1.0, *, generator: None = None) -> Tensor:
    """Draw exponentially distributed numbers of rate `lambd`, above 0."""
    return -torch.log1p(-draw_like(x, seed, site).clamp(2.0**-25)) / lambd


def uniform_between(
    seed: Tensor, site: int, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Tensor:
    """Draw numbers in [low, high) in the shape of x."""
    return low + (high - low) * draw_like(x, seed, site)


def normal(
    seed: Tensor, site: int, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> Tensor:
    """Draw normally distributed numbers in the shape of x (Box and Muller, 1958)."""
    radius, turn = (-2 * torch.log1p(-draw_like(x, seed, site))).sqrt(), 2 * math.pi * draw_like(x, seed, -2 - site)
    return mean + std * radius * turn.cos()


def integers(seed: Tensor, site: int, x: Tensor, *bounds: int) -> Tensor:
    """Draw integers in [low, high) in the shape and dtype of x; with a single bound, low is 0."""
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    parts = uniform(x, seed, site).double() + uniform(x, seed, -2 - site).double() / 2.0**24  # 48 bits
    return low + (parts * (high - low)).floor().to(x.dtype)


def draw_by_size(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt `draw` to an operator that takes a size."""

    def of_size(seed: Tensor, site: int, size: Sequence[int], *, dtype=None, device=None, **_: Any) -> Tensor:
        return draw(seed, site, torch.zeros(size, dtype=dtype, device=device))

    return of_size


def draw_by_tensor(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt `draw` to an operator that takes a tensor of the wanted size."""

    def of_tensor(seed: Tensor, site: int, x: Tensor, *bounds: int, dtype=None, **_: Any) -> Tensor:
        return draw(seed, site, x if dtype is None else x.to(dtype), *bounds)

    return of_tensor


def integers_by_size(seed: Tensor, site: int, *bounds_and_size: Any, dtype=None, device=None, **_: Any) -> Tensor:
    """Draw integers for an operator that takes bounds, then a size."""
    *bounds, size = bounds_and_size
    return integers(seed, site, torch.zeros(size, dtype=dtype or torch.int64, device=device), *bounds)


KEYED: dict[str, Callable[..., Tensor]] = {
    "bernoulli": bernoulli,
    "exponential": exponential,
    "normal_functional": normal,
    "rand": draw_by_size(uniform_between),
    "rand_like": draw_by_tensor(uniform_between),
    "randint": integers_by_size,
    "randint_like": draw_by_tensor(integers),
    "randn": draw_by_size(normal),
    "randn_like": draw_by_tensor(normal),
    "uniform": uniform_between,
}


def keyed_form(node: fx.Node) -> Callable[..., Tensor] | None:
    """Return an operator as a function of a seed, a site and its arguments; None if it is not written so."""
    record = OPERATORS.get(node.target)  # type: ignore[arg-type]
    if record is None or record.dropping is None:
        return KEYED.get(name_of(node))
    dropping = record.dropping

    def attention(seed: Tensor, site: int, *operands: Any, **options: Any) -> Tensor:
        return dropping(lambda weights, p: dropout(weights, p, seed, site), *operands, **options)

    return attention


def names() -> list[str]:
    """List the operators that have such a function."""
    return sorted([*KEYED, *(key_of(op) for op, record in OPERATORS.items() if record.dropping)])
