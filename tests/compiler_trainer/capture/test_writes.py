"""Models that write into slices, views and masked parts of their values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import LRS, NO_DECAY, compile_lockstep, trained_alike
from sweeps import in_turn
from torch import nn

from compiler_trainer import UserError
from compiler_trainer.capture.capture import capture
from passes.ir import ir

MESHES = [{}, {"dp_shard": 2, "tp": 2}, {"cp": 3}]


class Between(nn.Module):
    """An in-place operation between two linear layers."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.write = nn.Linear(6, 6).double(), nn.Linear(6, 6).double(), write

    def forward(self, x):
        return self.b(self.write(self.a(x), x))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, 5, 6, generator=generator, dtype=torch.float64)} for _ in LRS]


def entry_of_a_fresh_tensor(y, x):
    z = torch.zeros_like(y)
    z[:, 1] = y[:, 0]
    z[:, 2:] = y[:, 2:]
    return z


def last_dim_of_an_empty_tensor(y, x):
    z = torch.empty_like(y)
    z[..., :4] = y[..., :4]
    z[..., 4:] = 2 * y[..., :2]
    return z


def all_of_it(y, x):
    return torch.empty_like(y).copy_(y)


def what_has_views(y, x):
    z = y * 2
    view = z.view(-1, 6)
    z[:, 0].copy_(y[:, 1])
    z[:, 1].mul_(3)
    return view.view_as(z)


def through_a_transpose(y, x):
    z = y.clone()
    z.transpose(1, 2).copy_(y.transpose(1, 2) * 2)
    return z


def of_another_dtype_and_shape(y, x):
    z = y.clone()
    z[:, 1:3] = y[:, :1].float()
    return z


def entry_by_entry(y, x):
    z = torch.zeros(y.shape, dtype=y.dtype)
    for i in range(y.shape[1]):
        z[:, i] = y[:, i] * (i + 1)
    return z


def every_other(y, x):
    z = y.clone()
    z[:, ::2] += 1.5
    return z


def where_a_mask_is_true(y, x):
    z = y.clone()
    z[x > 0.1] = 0.5
    return z


def where_it_is_positive_itself(y, x):
    y[y > 0] = 0
    y[:, 0][x[:, 0] > 0.5] = 1
    return y


def a_constant_where_a_mask_is_true(y, x):
    y.index_put_((x[..., 0] > 0,), torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=y.dtype), accumulate=True)
    return y.clamp(torch.tensor(-0.5, dtype=y.dtype), torch.tensor(2.0, dtype=y.dtype)) * torch.tensor(1.5)


def at_the_largest(y, x):
    z = torch.zeros_like(y)
    z.scatter_(-1, y.detach().topk(2, -1)[1], 1.0)
    return y * z


def a_row_where_a_mask_is_true(y, x):
    z = y.clone()
    z[x[..., 0] > 0] = torch.arange(6, dtype=y.dtype)
    return z


def a_mask_of_dims_in_the_middle(y, x):
    z = torch.ops.aten.index_put(y, [None, x[0, :, 0] > 0, None], torch.tensor(2.0, dtype=y.dtype))
    z = torch.ops.aten.index_put(z, [x[:, 0, 0] > 0, None, None], torch.arange(6, dtype=y.dtype), True)
    return torch.ops.aten.index_put(z, [x[..., 0] > 0.5, None], torch.tensor([[3.0]], dtype=y.dtype))


def at_indices(y, x):
    z = y.clone()
    z[:, torch.tensor([0, 2])] = y[:, :2]
    z.unsqueeze(1)[:, 0, 1].add_(y[:, 2])
    return z


def one_hot(y, x):
    return y * F.one_hot(y.detach().argmax(-1), 6)


WRITES = [entry_of_a_fresh_tensor, last_dim_of_an_empty_tensor, all_of_it, what_has_views, through_a_transpose,
          of_another_dtype_and_shape, entry_by_entry, every_other, where_a_mask_is_true, where_it_is_positive_itself, a_constant_where_a_mask_is_true,
          at_the_largest, a_row_where_a_mask_is_true,
          a_mask_of_dims_in_the_middle,
          at_indices, one_hot]  # fmt: skip


@pytest.mark.parametrize(("write", "mesh"), in_turn(WRITES, MESHES), ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.sample(2)
def test_it_trains_as_on_one_device(write, mesh):
    trained_alike(Between(write), loss, data(), mesh, NO_DECAY)


class Parts(nn.Module):
    """Layers of two modules each, with a write between them."""

    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}) for _ in range(2))
        self.write = write
        self.double()

    def forward(self, x):
        for layer in self.layers:
            y = layer["a"](x)
            x = x + layer["b"](torch.tanh(y + self.write(y, x)))
        return x


def one_after_another(y, x):
    z = torch.zeros_like(y)
    for i in range(1, y.shape[1]):
        z[:, i] = z[:, i - 1].clone() * 0.5 + y[:, i]
    return z


BETWEEN = [entry_of_a_fresh_tensor, last_dim_of_an_empty_tensor, every_other, one_after_another]


@pytest.mark.parametrize(("write", "mesh"), in_turn(BETWEEN, MESHES), ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.sample(2)
def test_a_write_between_modules_of_a_layer_is_of_the_layer(write, mesh):
    trained_alike(Parts(write), loss, data(), mesh, NO_DECAY)
    program, _ = capture(Parts(write), loss, data()[0], torch.device("cpu"))
    written = [str(ir.layer(node)) for node in program.calls() if "scatter" in str(node.target)]
    assert sorted(set(written)) == ["layers.0", "layers.1"] and written == sorted(written)


def test_rows_that_are_sharded_are_not_gathered_for_a_write():
    step = compile_lockstep(Between(entry_of_a_fresh_tensor), loss, data()[0], {"dp_shard": 2}, NO_DECAY)
    (shard,) = [p["report"] for p in step.report["passes"] if (p["program"], p["name"]) == ("forward", "shard")]
    moved = {change["node"] for change in shard["reshards"]}
    assert shard["counts"]["unknown"] == 0 and moved <= {"div", *(f"p_model_{n}" for n in ("a_weight", "a_bias", "b_weight", "b_bias"))}


def test_a_value_for_each_true_entry_is_refused():
    def write(y, x):
        z = y.clone()
        z[x[0, :, 0] > -99] = y[:5]  # as many entries as the mask has, if all are true
        return z

    with pytest.raises(UserError, match=r"test_writes.py:\d+.*use torch.where"):
        compile_lockstep(Between(lambda y, x: write(y.transpose(0, 1), x)), loss, data()[0], {}, NO_DECAY)


def test_what_a_model_asserts_of_values_is_said_to_be_left_out():
    def write(y, x):
        torch._assert_async((x < 100).all(), "too large")
        return y

    with pytest.warns(UserWarning, match=r"test_writes.py:\d+ asserts a condition on values"):
        compile_lockstep(Between(write), loss, data()[0], {}, NO_DECAY)


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}], ids=str)
def test_a_kernel_whose_strides_are_not_those_of_its_fake_one(mesh):
    """The gradient of softplus has the layout of its incoming gradient, and is then viewed as the graph recorded it."""

    def write(y, x):
        return F.softplus(y.unflatten(-1, (2, 3))).permute(0, 2, 1, 3).cumsum(1).permute(0, 2, 1, 3).flatten(-2)

    trained_alike(Between(write), loss, data(), mesh, NO_DECAY)
