"""A dim can be followed through as many operators as a model has."""

from __future__ import annotations

import torch
from oracle import NO_DECAY, trained_alike
from torch import Tensor, nn


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(300):
            y = y * 1.001 + 0.0001
        return self.down(y)


def test_a_column_and_a_row_with_hundreds_of_operators_between_them():
    torch.manual_seed(0)
    data = [{"x": torch.randn(4, 5).double()} for _ in range(3)]
    step = trained_alike(Deep(), lambda model, batch: model(batch["x"]).square().mean(), data, {"tp": 2}, NO_DECAY)
    assert [str(step.tensors()[f"model.{name}.weight"][0]) for name in ("up", "down")] == ["[8@tp, 5]", "[3, 8@tp]"]
