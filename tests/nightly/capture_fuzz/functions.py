"""Functions for random bodies to call: custom autograd functions whose gradients are not their derivatives, writes.

`x.data` is written only where autograd has saved nothing of `x`: it would compute with the new entries, unnoticed.
"""

from __future__ import annotations

import torch


def with_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x` with the entries of `y` and its own gradient."""
    x.data = y.to(x.dtype, copy=True)
    return x


def with_halved_data(x: torch.Tensor) -> torch.Tensor:
    """`x` halved, with its own gradient."""
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
    """A product of two operands that it saves."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient * w * 0.5, (gradient * x).sum(0)


class Swish(torch.autograd.Function):
    """A function that saves what it computed, set up apart from its forward."""

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
    """A product of matrices, which autocast changes the dtype of."""

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
