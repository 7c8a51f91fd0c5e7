"""A model that branches on its mode is evaluated in eval mode; one that only has dropout, or no branch, is captured once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import SEQ_LEN, VOCAB, Embedded, batches, compile_lockstep
from torch import nn

from compiler_trainer.capture.modes import places_that_ask
from compiler_trainer.step import exported


class Branching(Embedded):
    """Logits are twice as large in training, as a temperature may make them."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return 2.0 * logits if self.training else logits


class Asking(Embedded):
    """A question without a consequence."""

    def forward(self, tokens):
        scale = 1.0 if self.training else 1.0
        return super().forward(tokens) * scale


class Dropping(Embedded):
    def forward(self, tokens):
        return F.dropout(super().forward(tokens), 0.0, self.training)  # dropout


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


@pytest.fixture
def captures(monkeypatch):
    counted = []
    original = exported.export_once
    monkeypatch.setattr(exported, "export_once", lambda *args: counted.append(1) or original(*args))
    return counted


@pytest.mark.parametrize(("kind", "count"), [(Branching, 2), (Asking, 2), (Dropping, 1), (Embedded, 1)])
def test_evaluation_is_in_eval_mode(kind, count, captures):
    batch, model = batches()[0], kind().double()
    step = compile_lockstep(model, loss, batch, {"dp_shard": 2}, evaluate=True)
    assert step.evaluate(batch) == pytest.approx(loss(model.eval(), batch).item(), rel=1e-12)
    assert len(captures) == count and model.train().training
    names = {entry["name"] for entry in step.report["passes"]}
    assert names  # the step was compiled


def test_only_the_model_s_own_questions_count():
    model = nn.Sequential(Branching(), nn.Dropout(0.5), nn.BatchNorm1d(SEQ_LEN))
    with places_that_ask() as places:
        model(torch.zeros(2, SEQ_LEN, dtype=torch.long))
        assert model.training and model.eval() and not model.training
    assert {place.rpartition("/")[2].partition(":")[0] for place in places} == {"test_modes.py"}
    assert not hasattr(nn.Module, "training") and model.train().training and VOCAB
