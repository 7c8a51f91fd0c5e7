"""Outputs that are views of state are read before the state is updated; equal names and NaN in the optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, Embedded, compile_lockstep, points, squared_error, trained_alike
from torch import nn

from compiler_trainer import UserError
from passes.update.update import round_at_random


class Shifts(nn.Module):
    """Buffers that take over each other's values, and one that takes over a weight."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        for name in names:
            self.register_buffer(name, torch.full((3,), float(len(name))))
        self.register_buffer("target", torch.zeros(3, 5))

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.before.copy_(self.now)
            self.now.copy_(y.mean(0))
            self.target.copy_(self.linear.weight)
        return y


@pytest.mark.parametrize("names", [("now", "before"), ("before", "now")], ids=str)
@pytest.mark.parametrize(("mesh", "microbatches"), [({}, 1), ({"dp_shard": 2}, 2)], ids=str)
def test_buffers_take_over_the_values_before_the_update(names, mesh, microbatches):
    trained_alike(Shifts(names).double(), squared_error, points(4), mesh, NO_DECAY, microbatches=microbatches)


def test_a_metric_that_is_a_parameter_is_its_value_before_the_update():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.linear(x) * self.scale

    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"]), {"scale": model.scale.detach()}

    batch = points()[0]
    step = compile_lockstep(Scaled().double(), loss, batch, {"dp_shard": 2}, {"name": "sgd"})
    assert step(batch, 0.1)["scale"] == 0.5


def test_two_moments_of_one_name_are_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(32, 256)), nn.Linear(1, 32, bias=False)

        def forward(self, x):
            return x @ self.weight.t() * self.scale.weight[:, 0]

    batch = {"x": torch.randn(4, 256), "y": torch.randn(4, 32)}
    with pytest.raises(UserError, match="two tensors of the optimizer's state are called exp_avg.scale.weight"):
        compile_lockstep(Scaled(), squared_error, batch, {}, {"name": "adamw8bit"})


def test_rounding_at_random_keeps_what_is_no_number():
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000, -0x800000, -1], dtype=torch.int32)  # NaN, NaN, inf, -inf, NaN
    for step in range(5):
        rounded = round_at_random(bits.view(torch.float32), torch.tensor(step), 3, torch.arange(5))
        assert rounded.isnan().tolist() == [True, True, False, False, True]
        assert rounded[2:4].tolist() == [float("inf"), -float("inf")]


def test_a_penalty_over_the_count_of_labels_is_remarked_on():
    def loss(model, batch):
        logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        return (total + model.head.weight.square().sum()) / (labels != -100).sum()

    tokens = torch.randint(0, 61, (4, 7), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens, "labels": tokens.clone()}
    step = compile_lockstep(Embedded().double(), loss, batch, {}, {"name": "sgd"}, microbatches=2)
    assert step.report["remarks"]
