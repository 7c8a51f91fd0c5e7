"""Functions that random bodies call: writes, and custom autograd functions whose gradients are not their derivatives.

`x.data` is written only if autograd has saved nothing of `x`: backward would silently use the new entries.
"""

from __future__ import annotations

import torch


def with_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Replace the entries of `x` with those of `y`; `x` keeps its own gradient."""
    x.data = y.to(x.dtype, copy=True)
    return x


def with_halved_data(x: torch.Tensor) -> torch.Tensor:
    """Halve the entries of `x`; `x` keeps its own gradient."""
    x.data.mul_(0.5)
    return x


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is doubled."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Product(torch.autograd.Function):
    """An elementwise product that saves its two operands."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w * 0.5, (gradient * x).sum(0)


class Swish(torch.autograd.Function):
    """A function that saves its input in a `setup_context` separate from its forward."""

    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(x)


class Matmul(torch.autograd.Function):
    """A matmul, whose dtype autocast changes."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.to(x.dtype).mT

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (gradient @ w.to(gradient.dtype)).to(x.dtype), (gradient.mT @ x.to(gradient.dtype)).to(w.dtype)


class Halved(torch.autograd.Function):
    """A function that writes into its operand."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.25
