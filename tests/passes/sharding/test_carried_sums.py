"""A partial value is carried only into operators that are linear in it: by value against one device."""

from __future__ import annotations

import pytest
import torch
from oracle import compile_lockstep
from torch import Tensor, nn

PLAN = {"up.weight": {"tp": 0}, "down.weight": {"tp": 1}}


class Net(nn.Module):
    """Two layers of which the first leaves shards and the second a partial sum; `between` makes the result of them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False), between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.up(x), self.down)


def scaled_maximum(wide, down):
    return down(torch.tanh(wide)) * (wide.detach().amax(-1, keepdim=True) * 2.0)


def reshaped_maximum(wide, down):
    return down(torch.tanh(wide)) * wide.detach().amax(-1).unsqueeze(-1)


def count_of_a_sum(wide, down):
    return wide.sum(-1) * torch.count_nonzero(down(torch.relu(wide)))


def rounded_quotient(wide, down):
    return wide.sum(-1, keepdim=True) * torch.div(down(torch.relu(wide)), 0.1, rounding_mode="floor")


def shifted_sum(wide, down):
    return torch.tanh(down(torch.relu(wide)) + 0.5)


BETWEEN = (scaled_maximum, reshaped_maximum, count_of_a_sum, rounded_quotient, shifted_sum)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_what_is_not_linear_gets_whole_values(between, sequence_parallel):
    torch.manual_seed(0)
    model, batch = Net(between).double(), {"x": torch.randn(4, 3, 6, dtype=torch.float64)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    options = {"shard": {"plan": PLAN, "sequence_parallel": sequence_parallel}, "verify": "numeric"}
    step = compile_lockstep(model, loss, batch, {"tp": 2}, {"name": "sgd"}, passes=options)
    assert step(batch, 0.0)["loss"] == pytest.approx(loss(model, batch).item(), rel=1e-12)
