"""Values with a gradient: regions, operators that return their operand, writes that autograd does not see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import LRS, NO_DECAY, compile_lockstep, trained_alike
from torch import nn

from compiler_trainer import UserError
from compiler_trainer.capture.compare import captured_difference

UNCHANGED = {
    "float": lambda y, w: y.float(),
    "device": lambda y, w: y.to("cpu"),
    "dtype": lambda y, w: y.to(w.dtype),
    "other": lambda y, w: y.to(w),
    "type_as": lambda y, w: y.type_as(w),
    "flatten": lambda y, w: y.flatten(0, 0),
    "dropout": lambda y, w: F.dropout(y, 0.5, False),
    "expand": lambda y, w: y.expand_as(y),
    "view": lambda y, w: y.view(y.shape),
    "plain": lambda y, w: y,
}


class Watched(nn.Module):
    """An embedding with a running statistic that autograd does not follow."""

    def __init__(self, read, region=torch.no_grad):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.o = nn.Embedding(11, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.ones(()))
        self.read, self.region = read, region

    def forward(self, t):
        y = torch.tanh(self.e(t))
        with self.region():
            self.seen.mul_(0.9).add_(self.read(y, self.o.weight).abs().mean())
        return self.o(y)


def loss(model, batch):
    return model(batch["x"]).float().square().mean()


def tokens():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randint(0, 11, (4, 5), generator=generator)} for _ in LRS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read", UNCHANGED.values(), ids=UNCHANGED)
def test_an_operator_that_changes_nothing_cuts_no_gradient(read, dtype):
    assert captured_difference(Watched(read).to(dtype), loss, tokens()[0]) == ""


def test_a_statistic_in_a_region_leaves_the_gradient_on_a_mesh():
    model = Watched(UNCHANGED["dtype"]).double()
    trained_alike(model, lambda m, b: m(b["x"]).square().mean(), tokens(), {"dp_shard": 2, "tp": 2}, NO_DECAY)


class Body(nn.Module):
    """Operations between two linear layers; `seen` is a buffer."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(6, 6), nn.Linear(6, 6), body
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x):
        return self.b(self.body(self, self.a(x)))


def written_over(model, y):
    with torch.no_grad():
        y.mul_(0.5)
    return y


def written_over_by_a_view(model, y):
    with torch.no_grad():
        y.view(-1)[2:7].add_(y.detach().mean())
    return y


def written_over_by_data(model, y):
    z = y + 1
    z.data.mul_(0.5)
    return z


def written_over_detached(model, y):
    z = y + 1
    z.detach()[:, 1:].mul_(0.5)
    return z


def a_fresh_tensor_of_a_region(model, y):
    with torch.no_grad():
        z = torch.zeros_like(y)
    z[:, 1:] = y[:, 1:]
    return z


def a_buffer_without_a_region(model, y):
    model.seen.data.mul_(0.9).add_(y.mean(0))
    return y * model.seen


def inference(model, y):
    with torch.inference_mode():
        scale = y.to(y.dtype).abs().mean()
        with torch.enable_grad():
            scale = scale + model.a(y).mean()
    return y * scale.clone()


def no_grad_inside_autocast(model, y):
    with torch.autocast("cpu", torch.bfloat16):
        z = model.a(y)
        with torch.no_grad():
            scale = model.a(z).float().mean()
            with torch.enable_grad():
                z = model.a(z)
    return z.float() * scale


def autocast_inside_no_grad(model, y):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scale = model.a(y)
    return y * scale.float()


class Product(torch.autograd.Function):
    """A matmul whose dtype autocast chooses."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient.to(x.dtype) @ w.mT, x.mT @ gradient.to(x.dtype)


def a_function_inside_autocast(model, y):
    with torch.autocast("cpu", torch.bfloat16):
        z = Product.apply(y, model.a.weight)
    assert z.dtype is torch.bfloat16
    return y + z.float()


def switched_off_and_on(model, y):
    torch.set_grad_enabled(False)
    z = y.float()
    scale = z.mean()
    torch.set_grad_enabled(True)
    return z * scale


def parts_of_a_region(model, y):
    with torch.no_grad():
        first, second = y.split(3, -1)
    return torch.cat([first, second * y[..., :3]], -1)


BODIES = [
    written_over, written_over_by_a_view, written_over_by_data, written_over_detached, a_fresh_tensor_of_a_region,
    a_buffer_without_a_region, inference, no_grad_inside_autocast, autocast_inside_no_grad, switched_off_and_on,
    a_function_inside_autocast, parts_of_a_region,
]  # fmt: skip


def points(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(4, 6, generator=generator, dtype=dtype)} for _ in LRS]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_gradients_are_those_of_the_model(body):
    assert captured_difference(Body(body), loss, points()[0]) == ""


@pytest.mark.parametrize("body", [written_over, written_over_by_a_view], ids=lambda body: body.__name__)
@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2, "tp": 2}, {"tp": 3}], ids=str)
@pytest.mark.sample(2)
def test_a_write_that_autograd_does_not_see_trains_alike(body, mesh):
    trained_alike(Body(body).double(), lambda m, b: m(b["x"]).square().mean(), points(torch.float64), mesh, NO_DECAY)


def test_a_gradient_written_into_detached_memory_is_refused():
    def body(model, y):
        z = y.detach()
        z.mul_(model.a.bias)
        return y + z

    with pytest.raises(UserError, match=r"model: test_grad_modes.py:\d+ writes a value that has a gradient into memory .*; clone"):
        compile_lockstep(Body(body), loss, points()[0], {}, NO_DECAY)
