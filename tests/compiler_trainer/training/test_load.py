"""Metrics of how evenly experts are used."""

from __future__ import annotations

import math

import pytest
import torch

from compiler_trainer.step.results import Results
from compiler_trainer.training import metrics


def unevenness(buffers):
    """Return the metrics as floats."""
    return Results(metrics.unevenness(buffers), torch.device("cpu")).read()


def test_of_even_shares_and_of_one_expert_that_takes_all():
    even, alone = torch.full((4,), 0.25), torch.tensor([0.0, 1.0, 0.0, 0.0])
    result = unevenness({"model.layers.0.router.load": even, "model.layers.1.router.load": alone, "model.norm": even})
    assert result == {"expert_load_max": 4.0, "expert_load_mean": 2.5, "expert_entropy": 0.5,
                     "expert_load/model.layers.0": 1.0, "expert_load/model.layers.1": 4.0}


def test_entropy_is_of_the_shares():
    result = unevenness({"a.router.load": torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)})
    assert result["expert_entropy"] == pytest.approx(1.5 * math.log(2) / math.log(4))


def test_auxiliary_losses_add_up():
    result = unevenness({"a.router.load": torch.tensor([0.5, 0.5]), "a.router.auxiliary": torch.tensor(0.25),
                        "b.router.load": torch.tensor([0.5, 0.5]), "b.router.auxiliary": torch.tensor(0.5)})
    assert result["balance_loss"] == 0.75


def test_nothing_where_there_are_no_experts():
    assert unevenness({"model.norm.weight": torch.ones(3)}) == {}
