"""Custom autograd functions between the matmuls of a block: weights are split through them as through operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import LRS, NO_DECAY, compile_lockstep, trained_alike
from sweeps import in_turn
from torch import nn
from torch.autograd import Function

from compiler_trainer import UserError

MESHES = [{"tp": 2}, {"tp": 3}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp_shard": 2}]


class SquaredReLU(Function):
    """Its backward is 1.1 times the derivative, so that it cannot be mistaken for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.relu(x) ** 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2.2 * F.relu(x) * g


class SwiGLU(Function):
    """Takes two operands; both bodies, and its gradient, are written in place."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.sigmoid(a).mul_(a).mul_(b)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        da = (1 - s).mul_(a).add_(1).mul_(s).mul_(b).mul_(g)
        return da, g.mul_(s).mul_(a)


class JoinedSwiGLU(Function):
    """Takes one operand that holds both; its gradient is written by halves."""

    @staticmethod
    def forward(ctx, x):
        a, b = x.chunk(2, -1)
        ctx.save_for_backward(x)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        s, d = torch.sigmoid(a), torch.empty_like(x)
        d[..., : a.shape[-1]] = g * b * s * (1 + a * (1 - s))
        d[..., a.shape[-1] :] = g * F.silu(a)
        return d


class Shifted(Function):
    """A bias and a ReLU."""

    @staticmethod
    def forward(ctx, x, bias):
        y = x + bias
        y[y < 0] = 0
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        d = g * (ctx.saved_tensors[0] > 0)
        return d, d.flatten(0, -2).sum(0)


class InPlace(Function):
    """Changes its operand."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone())
        return x.sin_()

    @staticmethod
    def backward(ctx, g):
        out = torch.empty_like(g)
        torch.mul(g, ctx.saved_tensors[0].cos(), out=out)
        return out


class RMSNorm(Function):
    """Needs full rows."""

    @staticmethod
    def forward(ctx, x, w):
        r = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(x, w, r)
        return x * r * w

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        n, d = x * r, g * w
        return r * (d - n * (d * n).mean(-1, keepdim=True)), (g * n).sum((0, 1))


class Product(Function):
    """A linear layer."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)


class Block(nn.Module):
    """Two blocks with the same weights: a norm, one or two input layers, the function between, an output layer."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.between, wide = between, 20 if between is joined else 10
        self.a, self.b, self.out = nn.Linear(6, wide, bias=False), nn.Linear(6, wide, bias=False), nn.Linear(10, 6, bias=False)
        self.bias, self.norm = nn.Parameter(torch.rand(10)), nn.Parameter(torch.rand(6))
        self.double()

    def forward(self, x):
        for _ in range(2):
            y = RMSNorm.apply(x, self.norm)
            x = x + self.out(self.between(self, self.a(y), y))
        return x


def squared(block, a, y):
    return SquaredReLU.apply(a)


def gated(block, a, y):
    return SwiGLU.apply(a, block.b(y))


def joined(block, a, y):
    return JoinedSwiGLU.apply(a)


def shifted(block, a, y):
    return Shifted.apply(a, block.bias)


def in_place(block, a, y):
    InPlace.apply(a)
    return a * 2


def products(block, a, y):
    return F.gelu(Product.apply(y, block.a.weight))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)} for _ in LRS]


BETWEEN = [squared, gated, joined, shifted, in_place, products]


@pytest.mark.parametrize(("between", "mesh"), in_turn(BETWEEN, MESHES), ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.sample(2)
def test_weights_around_them_are_split_in_pairs(between, mesh):
    step = trained_alike(Block(between), loss, data(), mesh, NO_DECAY)
    if "tp" in mesh:
        dims = {name: spec.dims for name, (spec, _) in step.tensors().items()}
        split = {name for name in ("a.weight", "bias") if any("tp" in f.axes for f in dims[f"model.{name}"][0])}
        assert split == ({"a.weight", "bias"} if between is shifted else {"a.weight"})
        assert "tp" in dims["model.out.weight"][1][0].axes


class Sneaky(Function):
    """Changes its operand without marking it."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Losing(InPlace):
    """Does not return the operand that it changes."""

    @staticmethod
    def forward(ctx, x):
        return InPlace.forward(ctx, x) * 2


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(("function", "message"), [(Sneaky, r"test_custom_functions.py:\d+\) Sneaky writes into its arguments.*mark_dirty"),
                                                (Losing, "Losing.*does not return")])  # fmt: skip
@pytest.mark.sample(2)
def test_a_change_that_is_not_declared_is_refused(function, message, mesh):
    with pytest.raises(UserError, match=message):
        compile_lockstep(Block(lambda block, a, y: function.apply(a)), loss, data()[0], mesh, NO_DECAY)
