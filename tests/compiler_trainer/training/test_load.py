"""Metrics of how evenly experts are used."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import batches, compile_lockstep, llama

from compiler_trainer.config.schema import ExpertsConfig
from compiler_trainer.models.loss import loss_fn
from compiler_trainer.step.results import Results
from compiler_trainer.training import metrics, steps


def unevenness(buffers):
    """Return the metrics as floats."""
    return Results(metrics.unevenness(metrics.of_routers(buffers)), torch.device("cpu")).read()


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


@pytest.mark.full
def test_the_experts_of_all_pipeline_stages_are_measured():
    model = llama(n_layers=2, experts=ExpertsConfig(6, 2, 5, balance_loss=0.01))
    (_, one), (layers, two) = (used(model, mesh) for mesh in ({}, {"pp": 2}))
    assert layers == 2 and two == pytest.approx(one, rel=1e-12)
    assert [name for name in two if name.startswith("expert_load/")] == [f"expert_load/model.layers.{i}.feed_forward" for i in range(2)]


def used(model, mesh):
    """Return the number of pipeline ranks with a router, and the metrics after two microbatches."""
    data = batches(rows=4)
    step = compile_lockstep(model, loss_fn, data[0], mesh, microbatches=2)
    step(data[0])
    meters = steps.Meters.__new__(steps.Meters)
    meters.step = step
    return (len({s.stages for name, s in step.state.items() if name.endswith(metrics.LOAD)}),
            Results(meters.expert_use(), step.device).read())
