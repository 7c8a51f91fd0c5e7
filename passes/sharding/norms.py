"""Norms written as sums and products, for `normalize`: statistics of sharded rows are then sums over all ranks.

    batch_norm(x, w, b)    ->    m = sum(x) / n;  v = sum((x - m)^2) / n;  (x - m) * rsqrt(v + eps) * w + b

The variance is computed around the mean, in two sums: a single sum of squares would lose precision if the mean is
large.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Maybe = Tensor | None


def layer_norm(x: Tensor, shape: list[int], weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *_: Any):
    """Compute a layer norm in plain operators, so that padding's variance can be set to a safe value."""
    dims = list(range(-len(shape), 0))
    return rms_norm(x - x.mean(dims, keepdim=True), shape, weight, eps) + (0 if bias is None else bias)


def rms_norm(x: Tensor, shape: list[int], weight: Maybe = None, eps: float = 0.0) -> Tensor:
    """Compute a root-mean-square norm in plain operators, so that padding's mean square can be set to a safe value."""
    normalized = x * (x.square().mean(list(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    return normalized if weight is None else normalized * weight


def group_norm(x: Tensor, groups: int, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *_: Any) -> Tensor:
    """Compute a group norm in plain operators, so that padding's variance can be set to a safe value."""
    grouped = x.unflatten(1, (groups, -1))
    return scale_channels(layer_norm(grouped, list(grouped.shape[2:]), eps=eps).flatten(1, 2), weight, bias)


def batch_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool, momentum: float, eps: float, *_: Any
) -> Tensor:
    """Normalize x[n, c, ...] over all dims except channels, or by the given statistics."""
    return batch_norm_functional(x, weight, bias, mean, var, training, momentum, eps)[0]


def batch_norm_of_batch(x: Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float):
    """Return (normalized, mean, reciprocal deviation) by the batch's own statistics."""
    return batch_norm_functional(x, weight, bias, None, None, True, momentum, eps)[:3]


def batch_norm_given(x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, var: Tensor, momentum: float, eps: float):
    """Return (normalized, mean, reciprocal deviation) by the given statistics."""
    return batch_norm_functional(x, weight, bias, mean, var, False, momentum, eps)[:3]


def batch_norm_functional(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool, momentum: float, eps: float
) -> tuple[Maybe, ...]:
    """Return (normalized, mean, reciprocal deviation, new running mean, new running variance)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not training and mean is not None and var is not None:
        rstd = (var + eps).rsqrt()
        normalized = (wide - per_channel(mean, x)) * per_channel(rstd, x)
        return scale_channels(normalized, weight, bias).to(x.dtype), mean, rstd, mean, var
    dims = [d for d in range(x.dim()) if d != 1]
    batch_mean = wide.mean(dims)
    centred = wide - per_channel(batch_mean, x)
    variance = centred.square().mean(dims)
    rstd = (variance + eps).rsqrt()
    count = math.prod(x.shape[d] for d in dims)
    unbiased = variance * (count / max(count - 1, 1))
    running = (update_average(mean, batch_mean, momentum), update_average(var, unbiased, momentum))
    return scale_channels(centred * per_channel(rstd, x), weight, bias).to(x.dtype), batch_mean, rstd, *running


def update_average(running: Maybe, new: Tensor, momentum: float) -> Maybe:
    """Return the running average updated with the next value."""
    return None if running is None else running * (1 - momentum) + new.detach().to(running.dtype) * momentum


def scale_channels(x: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    """Apply a weight and a bias per channel to x[n, c, ...], if present."""
    x = x if weight is None else x * per_channel(weight, x)
    return x if bias is None else x + per_channel(bias, x)


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """Reshape value[c] to [1, c, 1, ...], to broadcast with x[n, c, ...]."""
    return value.reshape(1, -1, *[1] * (x.dim() - 2))
