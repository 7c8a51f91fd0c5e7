"""Optimizers as functions of one parameter's local shard; all arithmetic is elementwise and in fp32 or wider.

A complex number is updated as the pair of its parts, as in torch.optim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an update's arithmetic: fp64 for fp64 parameters, otherwise fp32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


class Moment(NamedTuple):
    """State with one value per entry of a parameter, zero at first.

    Attributes:
        name: its name in checkpoints.
        signed: False if it is never negative.
    """

    name: str
    signed: bool = True


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype; the tensor itself if it has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)


def real(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a real dtype, complex numbers as pairs in a last dim."""
    return cast(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, dtype)


def to_stored_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a result of `real` in the dtype in which it is stored."""
    return torch.view_as_complex(cast(x, dtype.to_real())) if dtype.is_complex else cast(x, dtype)


class Optimizer(Protocol):
    """The interface of elementwise optimizers. All tensors of an update are fp32, for fp64 parameters fp64."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The state per parameter."""
        ...

    def scalars(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Return the 0-d values that all updates share, of the learning rate `lr` and the `step`, counted from 1."""
        ...

    def update(
        self, parameter: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new `parameter` and `moments` of one shard, given its `gradient` and the shared `scalars`."""
        ...


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    moments: tuple[Moment, ...] = (Moment("exp_avg"), Moment("exp_avg_sq", signed=False))

    def scalars(self, lr, step):
        beta1, beta2 = self.betas
        return 1 - lr * self.weight_decay, lr / (1 - beta1**step), 1 - beta2**step

    def update(self, parameter, gradient, moments, scalars):
        (m, v), (decay, rate, correction) = moments, scalars
        beta1, beta2 = self.betas
        m = m + (1 - beta1) * (gradient - m)
        v = beta2 * v + (1 - beta2) * gradient * gradient
        return parameter * decay - rate * m / ((v / correction).sqrt() + self.eps), (m, v)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with heavy-ball momentum and coupled weight decay, as in torch.optim.SGD."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The momentum buffer, if there is momentum."""
        return (Moment("momentum"),) if self.momentum else ()

    def scalars(self, lr, step):
        return (lr,)

    def update(self, parameter, gradient, moments, scalars):
        (lr,) = scalars
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameter
        buffers = tuple(self.momentum * moment + gradient for moment in moments)
        return parameter - lr * (buffers[0] if buffers else gradient), buffers


@dataclass(frozen=True)
class Muon:
    """Orthogonalized Nesterov momentum, computed in `dtype` (None: the parameter's), and decoupled weight decay.

    AdamW updates the `others`: parameters that are no matrices, the head and routers (`passes/update/groups.py`).
    """

    momentum: float = 0.95
    weight_decay: float = 0.0
    dtype: torch.dtype | None = None
    others: AdamW = AdamW()
    moments: tuple[Moment, ...] = (Moment("momentum"),)

    def scalars(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Return the factor that decays the parameter, and the rate."""
        return 1 - lr * self.weight_decay, lr

    def direction(self, gradient: Tensor, moments: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the momentum one step ahead, and the momentum."""
        (moment,) = moments
        moment = moment + (1 - self.momentum) * (gradient - moment)
        return gradient + self.momentum * (moment - gradient), (moment,)

    def update(
        self, parameter: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new parameter, given an orthogonal direction."""
        decay, rate = scalars
        return parameter * decay - rate * gradient, moments


def keeps_zeros(optimizer: Optimizer, dtype: torch.dtype) -> bool:
    """Return True if an update in a `dtype` is known to leave zeros zero: the padding of shards has no other values."""
    if type(optimizer) is AdamW:
        return bool(torch.tensor(optimizer.eps, dtype=dtype) > 0)  # else 0 / 0
    return type(optimizer) in (SGD, Muon)
