"""A job with an untested model starts with a comparison of its graph with the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from compiler_trainer import UserError
from compiler_trainer.capture import grad_modes
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.training import prepare
from compiler_trainer.training.prepare import check_capture, is_tested


class Watched(nn.Module):
    """A model with a statistic of a cast that changes nothing."""

    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(11, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = torch.tanh(self.e(x))
        with torch.no_grad():
            self.seen.mul_(0.9).add_(y.float().mean())
        return self.o(y)


def checked(loss=lambda model, batch: model(batch["x"]).square().mean(), verify="structure") -> str:
    torch.manual_seed(0)
    model, cfg = Watched(), SimpleNamespace(model=None, has_own_loss=False, sees=False, passes=SimpleNamespace(verify=verify))
    values = [*model.named_parameters(), *model.named_buffers()]
    trained = SimpleNamespace(module=model, loss=loss, initial=lambda: ((n, v.detach().clone()) for n, v in values))
    return check_capture(cfg, trained, lambda: {"x": torch.arange(10).view(2, 5)})


@pytest.mark.parametrize(("job", "is_known"), [
    ([], True),
    (["recipe=windowed_50m"], False),
    (["loss=dpo"], True),
    (["loss._target_=torch.nn.functional.mse_loss"], False),
    *([[f"model={name}"], True] for name in ("llama3_8b", "moe_debug")),
])
def test_jobs_of_the_trainers_own_models_start_without_a_comparison(job, is_known):
    assert is_tested(to_config(compose(job))) == is_known


@pytest.mark.parametrize("most", [1e10, 0])
def test_a_model_that_is_captured_as_it_is_passes(monkeypatch, most):
    monkeypatch.setattr(prepare, "MOST_WORK", most)
    assert checked() == ""


@pytest.mark.parametrize(("most", "says"), [(1e10, "model: gradient of e.weight differs by"), (0, "model: no gradient reaches e.weight")])
def test_a_gradient_that_capture_cuts_ends_the_job(monkeypatch, most, says):
    monkeypatch.setattr(prepare, "MOST_WORK", most)
    monkeypatch.setattr(grad_modes, "same_value", lambda node: None)
    with pytest.raises(UserError, match=says):
        checked()
    assert checked(verify="none") == ""


def test_a_model_that_does_not_run_here_is_noted():
    def loss(model, batch):
        if not torch.compiler.is_exporting():
            raise RuntimeError("only on a GPU")
        return model(batch["x"]).square().mean()

    assert checked(loss).startswith("note: the captured graph is not compared") and "only on a GPU" in checked(loss)
