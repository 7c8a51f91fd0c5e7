"""Assignments to a model's state in forward: buffers are written, other state is refused or warned of."""

from __future__ import annotations

import pytest
import torch
from oracle import NO_DECAY, compile_lockstep, trained_alike
from torch import nn

from compiler_trainer.config.errors import UserError


class Stateful(nn.Module):
    """Two linear layers with a function of the model and the features between them, in a module of the model."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("other", torch.ones(6))
        self.plain, self.count, self.cache = torch.zeros(6, dtype=torch.float64), 0, None

    def forward(self, x):
        return self.down(self.function(self, self.up(x).tanh()))


def loss(model, batch):
    return (model[0](batch["x"]) - 0.3).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 7, 6, generator=generator, dtype=torch.float64)} for _ in range(3)]


def averaged(model, x):
    model.average = 0.9 * model.average + 0.1 * x.detach().mean((0, 1))
    return x - model.average


def swapped(model, x):
    model.average, model.other = 1.1 * model.other, model.average + x.detach().mean((0, 1))
    return x - model.average * model.other


def mixed(model, x):
    model.average.add_(x.detach().mean((0, 1)))
    model.average = 0.5 * model.average
    model.average.mul_(0.9)
    return x - model.average


def written_first(model, x):
    model.plain, model.cache = x.detach().mean((0, 1)), x
    return x - model.plain


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("function", [averaged, swapped, mixed, written_first])
@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_assigned_buffers_are_those_of_eager_pytorch(function, mesh):
    trained_alike(nn.Sequential(Stateful(function)).double(), loss, data(), mesh, NO_DECAY)


def grown(model, x):
    model.average = x.detach().mean(0)
    return x - model.average


def read_and_replaced(model, x):
    model.plain = 0.9 * model.plain + 0.1 * x.detach().mean((0, 1))
    return x - model.plain


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize(("function", "message"), [
    (grown, r"^model: buffer 0.average of torch.float64 \[6\] is assigned torch.float64 \[7, 6\] in forward; keep its shape"),
    (read_and_replaced, "^model: 0.plain is a tensor that forward reads and replaces, and no buffer, .* register it as a buffer"),
])
def test_state_that_a_graph_cannot_carry_is_refused(function, message):
    with pytest.raises(UserError, match=message):
        compile_lockstep(nn.Sequential(Stateful(function)).double(), loss, data()[0], {})


def test_numbers_that_change_are_warned_of():
    def counted(model, x):
        model.count += 1
        return x * model.count

    with pytest.warns(UserWarning, match="model: 0.count changes from 0 to 1 in forward"):
        compile_lockstep(nn.Sequential(Stateful(counted)).double(), loss, data()[0], {})
