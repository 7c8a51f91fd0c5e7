"""Labels and tokens that are no class make the loss NaN where PyTorch would raise, and never a plausible number."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, Embedded, compile_lockstep

CLASSES = 61
CHUNKS = {"passes": {"chunk_loss": {"chunks": 2}}}


def mean(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def of_each(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none").square().mean()


@pytest.mark.parametrize("wrong", [-1, CLASSES, CLASSES + 40])
@pytest.mark.parametrize(
    "entry, loss, mesh, options",
    [
        ("labels", mean, {}, CHUNKS),
        ("labels", of_each, {}, CHUNKS),
        ("labels", mean, {"tp": 2}, CHUNKS),
        ("labels", mean, {"tp": 2}, {}),
        ("tokens", mean, {"tp": 2}, {}),
        ("tokens", mean, {"tp": 3}, {}),
    ],
    ids=["chunks", "chunks of each", "chunks of classes", "classes", "tokens", "tokens of three"],
)
@pytest.mark.sample(6)
def test_the_loss_is_nan(entry, loss, mesh, options, wrong):
    draw = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(0, CLASSES, (4, 6), generator=draw) for name in ("tokens", "labels")}
    batch["labels"][0, :3] = -100
    step = compile_lockstep(Embedded().double(), loss, batch, mesh, NO_DECAY, **options)
    assert math.isfinite(step(batch, 0.0)["loss"])
    batch[entry][1, 2] = wrong
    assert math.isnan(step(batch, 0.0)["loss"])
