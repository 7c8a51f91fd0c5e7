"""Evaluation in pipeline stages reads what training stores, for models that differ in eval mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiler_trainer import compile_step, pipeline
from compiler_trainer.step import programs
from passes.ir import ir
from tests.nightly.parity.case import Case
from tests.nightly.parity.record import run_case

ROUTED = "experts seed=350 length=2 rows=1 top_k=1 mesh.pp=3 optim.name=adamw passes.fold_layers=false eval.interval=1"


class Sided(nn.Module):
    """Four matmuls, and three more in training after the first: by work, eval mode would be cut elsewhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.sides = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.double()

    def forward(self, x):
        x = self.layers[0](x)
        if self.training:
            x = torch.dropout(x, 0.5, True) + sum(side(x) for side in self.sides)
        return self.layers[3](self.layers[2](self.layers[1](x).relu()).relu())


def loss_of(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_what_is_evaluated_is_what_was_trained(stages):
    model, batch = Sided(), {"x": torch.randn(4, 6, dtype=torch.float64)}
    how = {"microbatches": 2, "ranks": "lockstep", "optim": {"name": "sgd", "lr": 0.1}}
    step = compile_step(model, loss_of, batch, mesh={"pp": stages}, **how)
    for _ in range(3):
        step(batch)
    model.load_state_dict(step.state_dict())
    assert step.evaluate(batch) == pytest.approx(loss_of(model.eval(), batch).item(), abs=1e-12)


@pytest.mark.full
def test_a_buffer_that_only_training_reads_is_of_its_stage_alone():
    outcome = run_case(Case.parse(ROUTED)).outcome
    assert outcome.verdict == "right", str(outcome)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("module", "left_out", "says"),
    [
        (pipeline, "without_unread_state", "router.load' is trained"),
        (programs, "store_state_like", "is trained on"),
    ],
)
def test_state_that_training_has_elsewhere_is_heard(module, left_out, says, monkeypatch):
    monkeypatch.setattr(module, left_out, lambda first, *rest: first)
    with pytest.raises(ir.CompileError, match=says):
        if module is pipeline:
            case = Case.parse(ROUTED)
            subject, settings = case.subject(), case.settings()
            how = {"mesh": settings.mesh, "passes": settings.passes, "ranks": "lockstep"}
            compile_step(subject.model, subject.loss, subject.batches[0], **how)
        else:
            compile_step(Sided(), loss_of, {"x": torch.randn(4, 6, dtype=torch.float64)}, mesh={"pp": 2}, ranks="lockstep")
