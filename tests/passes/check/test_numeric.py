"""The values with which `passes.verify=numeric` runs a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiler_trainer import compile_step
from passes.check.numeric import telling
from passes.ir.ir import CompileError
from passes.rules import pointwise


def test_zeros_are_replaced_and_all_else_is_left():
    assert telling(torch.zeros(2, 9)).gt(0).all() and telling(torch.zeros(())).gt(0)
    for value in (torch.tensor([0.0, -1.0]), torch.zeros(3, dtype=torch.int64), torch.empty(0)):
        assert telling(value).equal(value)


class Average(nn.Module):
    """Keeps a running average of its inputs, initially zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layer(x)


def test_a_buffer_that_is_zero_hides_nothing(monkeypatch):
    """A zero added to every term of a sum would change nothing in the first step."""

    def compiled():
        return compile_step(Average().double(), lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(4, 4).double()},
                            mesh={"dp_shard": 2}, ranks="lockstep", passes={"verify": "numeric"})

    compiled()
    monkeypatch.setitem(pointwise.LINEAR, "add", [{0, 1}, {0}, {1}])
    with pytest.raises(CompileError, match="average"):
        compiled()
