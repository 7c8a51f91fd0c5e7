"""Random operators as functions of a seed: what each draws is what every mesh draws.

    bernoulli(x, 0.9)                      ->   uniform(x, seed, 3) < 0.9
    randn([4, 6])                          ->   sqrt(-2 log(1 - uniform(x, seed, 3))) * cos(2 pi uniform(x, seed, -5))
    attention(q, k, v, dropout_p=0.1)      ->   dropout(softmax(q k^T), 0.1, seed, 3) v

The numbers are not those of PyTorch's generator. `WRITTEN` maps an operator to a function of the seed, the site (which
counts the random operators of a graph) and the operator's own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.sharding.random import dropout, uniform


def drawn(x: Tensor, seed: Tensor, site: int) -> Tensor:
    """Numbers in [0, 1) of the shape and dtype of x."""
    return uniform(x, seed, site).to(x.dtype)


def bernoulli(seed: Tensor, site: int, x: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    """Ones with probability `p`, or with those in x, and zeros."""
    return (uniform(x, seed, site) < (x if p is None else p)).to(x.dtype)


def exponential(seed: Tensor, site: int, x: Tensor, lambd: float = 1.0, *, generator: None = None) -> Tensor:
    """Exponentially distributed numbers of rate `lambd`, above 0."""
    return -torch.log1p(-drawn(x, seed, site).clamp(2.0**-25)) / lambd


def between(
    seed: Tensor, site: int, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Tensor:
    """Numbers in [low, high) of the shape of x."""
    return low + (high - low) * drawn(x, seed, site)


def normal(
    seed: Tensor, site: int, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> Tensor:
    """Normally distributed numbers of the shape of x (Box and Muller, 1958)."""
    radius, turn = (-2 * torch.log1p(-drawn(x, seed, site))).sqrt(), 2 * math.pi * drawn(x, seed, -2 - site)
    return mean + std * radius * turn.cos()


def integers(seed: Tensor, site: int, x: Tensor, *bounds: int) -> Tensor:
    """Whole numbers in [low, high) of the shape and dtype of x; of one bound, low is 0."""
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    parts = uniform(x, seed, site).double() + uniform(x, seed, -2 - site).double() / 2.0**24  # 48 bits
    return low + (parts * (high - low)).floor().to(x.dtype)


def made(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`draw` for an operator that is given a size."""

    def of_size(seed: Tensor, site: int, size: Sequence[int], *, dtype=None, device=None, **_: Any) -> Tensor:
        return draw(seed, site, torch.zeros(size, dtype=dtype, device=device))

    return of_size


def like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`draw` for an operator that is given a tensor of the size."""

    def of_tensor(seed: Tensor, site: int, x: Tensor, *bounds: int, dtype=None, **_: Any) -> Tensor:
        return draw(seed, site, x if dtype is None else x.to(dtype), *bounds)

    return of_tensor


def made_integers(seed: Tensor, site: int, *given: Any, dtype=None, device=None, **_: Any) -> Tensor:
    """Whole numbers for an operator that is given bounds, then a size."""
    *bounds, size = given
    return integers(seed, site, torch.zeros(size, dtype=dtype or torch.int64, device=device), *bounds)


def attention(
    seed: Tensor,
    site: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention written out, q[..., t, d] over k[..., s, d]: its weights drop out; a row that sees nothing is zero."""
    if enable_gqa:
        groups = q.shape[-3] // k.shape[-3]
        k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:]).flatten(-4, -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        row, column = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        mask = row[:, None] >= column
    if mask is None or mask.is_floating_point():
        return dropout((scores if mask is None else scores + mask).softmax(-1), dropout_p, seed, site) @ v
    weights = torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(-1)
    return dropout(torch.where(mask, weights, 0.0), dropout_p, seed, site) @ v


WRITTEN: dict[str, Callable[..., Tensor]] = {
    "bernoulli": bernoulli,
    "exponential": exponential,
    "normal_functional": normal,
    "rand": made(between),
    "rand_like": like(between),
    "randint": made_integers,
    "randint_like": like(integers),
    "randn": made(normal),
    "randn_like": like(normal),
    "scaled_dot_product_attention": attention,
    "uniform": between,
}
