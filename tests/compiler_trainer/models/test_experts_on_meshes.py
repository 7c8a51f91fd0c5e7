"""Decoders with experts on meshes: losses, updates, corrections and shares equal those of a loop on one device."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import EXACT, assert_same, batches, compile_lockstep, llama, train_plainly, train_step
from sweeps import in_turn, quick

from compiler_trainer.config.schema import ExpertsConfig
from compiler_trainer.models.loss import TrainingOutputs
from compiler_trainer.parity.one_device import looped

MESHES = ({}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "dp_shard": 2}, {"dp_replicate": 2, "tp": 2})
EXPERTS = (
    ExpertsConfig(6, 2, 5, balance_loss=0.01),
    ExpertsConfig(8, 2, 5, shared=1, score="sigmoid", groups=4, top_groups=2, scale=2.5, bias_rate=0.1),
    ExpertsConfig(3, 1, 5, shared=1, score="sigmoid", normalize=False, weigh="input"),
)


def loss(model, batch):
    """Return `loss_fn` in the model's own dtype."""
    out = model(batch["tokens"], batch["positions"], batch["documents"])
    logits, auxiliary = (out.logits, out.balance) if isinstance(out, TrainingOutputs) else (out, 0.0)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + auxiliary


def data_of():
    """Return batches of sequences that end in padding, each at another position."""
    data = batches(rows=3)
    for batch in data:
        length = batch["tokens"].shape[1]
        is_real = torch.arange(length) < torch.tensor([[length], [length // 3], [length - 1]])
        batch |= {"documents": torch.where(is_real, 0, -1), "labels": batch["labels"].masked_fill(~is_real, -100)}
    return data


@pytest.mark.parametrize(("mesh", "cfg"), in_turn(MESHES, EXPERTS))
@pytest.mark.sample(1)
def test_three_updates(mesh, cfg):
    model, data = llama(experts=cfg), data_of()
    metrics, state = train_plainly(looped(model), loss, data)
    step = compile_lockstep(model, loss, data[0], mesh)
    for actual, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same(actual, expected, EXACT)
    assert_same(step.state_dict(), state, EXACT)
    counts = [p["report"]["counts"] for p in step.report["passes"] if p["name"] == "experts"]
    assert counts and all(actual == {"sorted by expert": 1} for actual in counts)


SPREAD = ({"dp_shard": 2, "tp": 2, "ep": 4}, {"cp": 2, "dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2},
          {"tp": 2, "ep": 2}, {"cp": 2, "tp": 2, "ep": 4})


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("mesh", "cfg", "dispatch", "plan"), quick(
    itertools.product(SPREAD, EXPERTS[:2], ("dropless", "all_gather"), ({}, None)), 0, 15, 32))
@pytest.mark.full
def test_three_updates_of_layers_whose_experts_are_spread(mesh, cfg, dispatch, plan):
    """Two layers, so that attention also reads values that experts left sharded over any axis."""
    model, data = llama(n_layers=2, experts=cfg), data_of()
    metrics, state = train_plainly(looped(model), loss, data)
    step = compile_lockstep(model, loss, data[0], mesh, passes={"moe": {"dispatch": dispatch}, "shard": {"plan": plan}})
    for actual, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same(actual, expected, EXACT)
    assert_same(step.state_dict(), state, EXACT)
