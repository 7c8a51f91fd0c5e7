"""Random operators as functions of a seed, so that the numbers drawn do not depend on the mesh.

    bernoulli(x, 0.9)                      ->   uniform(x, seed, 3) < 0.9
    randn([4, 6])                          ->   sqrt(-2 log(1 - uniform(x, seed, 3))) * cos(2 pi uniform(x, seed, -5))
    attention(q, k, v, dropout_p=0.1)      ->   dropout(softmax(q k^T), 0.1, seed, 3) v

Here 3 is the site, the operator's number among the random operators of the graph; -5 is the same operator's second
stream. Attention is rewritten by its record (`AttentionOp.dropping`). The numbers are not those of PyTorch's generator.

Draws are computed in float32, or in float64 for float64 results. In bfloat16 one of 500 uniform numbers would round to
1, and its normal number to infinity.
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


def second(site: int) -> int:
    """Return the site of an operator's second stream of numbers; sites count from 0, and -1 is that of no operator."""
    return -2 - site


def uniform_wide(x: Tensor, seed: Tensor, site: int) -> Tensor:
    """Draw numbers in [0, 1) in the shape of x, float32 or float64, in steps of 2^-24."""
    return uniform(x, seed, site).to(torch.promote_types(x.dtype, torch.float32))


def bernoulli(seed: Tensor, site: int, x: Tensor, p: float | None = None, *, generator: None = None) -> Tensor:
    """Draw ones with probability `p`, or with the values of x as probabilities if `p` is None; zeros otherwise."""
    return (uniform(x, seed, site) < (x if p is None else p)).to(x.dtype)


def exponential(seed: Tensor, site: int, x: Tensor, lambd: float = 1.0, *, generator: None = None) -> Tensor:
    """Draw positive, exponentially distributed numbers of rate `lambd`, in the shape and dtype of x."""
    numbers = -torch.log1p(-uniform_wide(x, seed, site).clamp(2.0**-25)) / lambd  # half a step instead of 0
    return numbers.to(x.dtype).clamp(torch.finfo(x.dtype).smallest_normal)


def uniform_between(
    seed: Tensor, site: int, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Tensor:
    """Draw numbers in [low, high) in the shape and dtype of x; a number that rounds to `high` becomes `low`."""
    numbers = (low + (high - low) * uniform_wide(x, seed, site)).to(x.dtype)
    return torch.where(numbers >= high, low, numbers)  # as PyTorch's own kernels do


def normal(
    seed: Tensor, site: int, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> Tensor:
    """Draw normally distributed numbers in the shape and dtype of x (Box and Muller, 1958)."""
    radius = (-2 * torch.log1p(-uniform_wide(x, seed, site))).sqrt()
    angle = 2 * math.pi * uniform_wide(x, seed, second(site))
    return (mean + std * radius * angle.cos()).to(x.dtype)


def integers(seed: Tensor, site: int, x: Tensor, *bounds: int) -> Tensor:
    """Draw integers in [low, high) in the shape and dtype of x; with a single bound, low is 0."""
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    fraction = uniform(x, seed, site).double() + uniform(x, seed, second(site)).double() / 2.0**24  # 48 bits
    return ((fraction * (high - low)).floor().to(torch.int64) + low).to(x.dtype)


def adapt_to_size(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt `draw` to an operator that takes a size."""

    def of_size(seed: Tensor, site: int, size: Sequence[int], *, dtype=None, device=None, **_: Any) -> Tensor:
        return draw(seed, site, torch.zeros(size, dtype=dtype, device=device))

    return of_size


def adapt_to_like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt `draw` to an operator that takes a tensor like its result."""

    def of_tensor(seed: Tensor, site: int, x: Tensor, *bounds: int, dtype=None, **_: Any) -> Tensor:
        return draw(seed, site, x if dtype is None else x.to(dtype), *bounds)

    return of_tensor


def integers_by_size(seed: Tensor, site: int, *bounds_and_size: Any, dtype=None, device=None, **_: Any) -> Tensor:
    """Draw integers for an operator that takes bounds, then a size."""
    *bounds, size = bounds_and_size
    return integers(seed, site, torch.zeros(size, dtype=dtype or torch.int64, device=device), *bounds)


# operator name -> the function of (seed, site, *arguments of the operator)
SEEDED: dict[str, Callable[..., Tensor]] = {
    "bernoulli": bernoulli,
    "exponential": exponential,
    "normal_functional": normal,
    "rand": adapt_to_size(uniform_between),
    "rand_like": adapt_to_like(uniform_between),
    "randint": integers_by_size,
    "randint_like": adapt_to_like(integers),
    "randn": adapt_to_size(normal),
    "randn_like": adapt_to_like(normal),
    "uniform": uniform_between,
}


def seeded_form(node: fx.Node) -> Callable[..., Tensor] | None:
    """Return the function of (seed, site, *arguments) that computes a random operator; None for any other operator."""
    record = OPERATORS.get(node.target)  # type: ignore[arg-type]
    if record is None or record.dropping is None:
        return SEEDED.get(name_of(node))
    dropping = record.dropping

    def seeded_attention(seed: Tensor, site: int, *operands: Any, **options: Any) -> Tensor:
        return dropping(lambda weights, p: dropout(weights, p, seed, site), *operands, **options)

    return seeded_attention


def seeded_names() -> list[str]:
    """Return the sorted names of the operators that `seeded_form` covers."""
    return sorted([*SEEDED, *(key_of(op) for op, record in OPERATORS.items() if record.dropping)])
