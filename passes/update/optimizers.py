"""Optimizers as functions of one parameter's local shard; all arithmetic is elementwise and in fp32 or wider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an update's arithmetic: fp64 for fp64 parameters, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Moment(NamedTuple):
    """State kept an entry of a parameter, zero at first; one that is not `signed` is never negative."""

    name: str
    signed: bool = True


class Optimizer(Protocol):
    """`moments` is the state kept a parameter."""

    @property
    def moments(self) -> tuple[Moment, ...]: ...

    def update(
        self, parameter: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], lr: Tensor, step: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """New parameter and moments; `lr` and `step` (counted from 1) are 0-d tensors."""
        ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    moments: tuple[Moment, ...] = (Moment("exp_avg"), Moment("exp_avg_sq", signed=False))

    def update(self, parameter, gradient, moments, lr, step):
        wide = arithmetic(parameter.dtype)
        p, g, (m, v) = parameter.to(wide), gradient.to(wide), (moment.to(wide) for moment in moments)
        beta1, beta2 = self.betas
        lr, step = lr.to(wide), step.to(wide)
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        denominator = (v / (1 - beta2**step)).sqrt() + self.eps
        p = p * (1 - lr * self.weight_decay) - lr / (1 - beta1**step) * m / denominator
        return p, (m, v)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with heavy-ball momentum and coupled weight decay, as in torch.optim.SGD."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The momentum buffer, if there is momentum."""
        return (Moment("momentum"),) if self.momentum else ()

    def update(self, parameter, gradient, moments, lr, step):
        wide = arithmetic(parameter.dtype)
        p, g = parameter.to(wide), gradient.to(wide)
        if self.weight_decay:
            g = g + self.weight_decay * p
        buffers = tuple(self.momentum * moment.to(wide) + g for moment in moments)
        return p - lr.to(wide) * (buffers[0] if buffers else g), buffers
