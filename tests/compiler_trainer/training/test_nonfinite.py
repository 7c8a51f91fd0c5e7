"""Runs with a loss that is infinite or not a number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from short_runs import FakeStep, metrics, options, resuming, timeless

from compiler_trainer import checkpoint
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.validate import validate
from compiler_trainer.training import anomalies, steps, trainer
from compiler_trainer.training.anomalies import Lost


def policy(cfg, name):
    return replace(cfg, train=replace(cfg.train, nonfinite=name))


class Run:
    """A trainer around a `FakeStep` whose loss is not finite at given calls."""

    def __init__(self, monkeypatch, is_bad, norm=False):
        self.rows, self.weights = [], []
        normal = FakeStep.__call__

        def step(fake, batch, lr):
            self.rows.append(batch["tokens"])
            self.weights.append(fake.state["model.w"].local[0].clone())
            if not is_bad(len(self.rows), fake.state["model.w"].local[0]):
                return normal(fake, batch, lr)
            return {"loss": math.nan, "grad_norm": math.inf if norm else 1.0}

        monkeypatch.setattr(trainer, "compile_step", FakeStep)
        monkeypatch.setattr(FakeStep, "__call__", step)


@pytest.mark.parametrize("norm", [False, True])
def test_stop_keeps_the_last_good_checkpoint_and_says_what_helps(tmp_path, monkeypatch, norm):
    Run(monkeypatch, lambda call, w: call == 4, norm)
    what = "loss is nan, grad_norm is inf" if norm else "loss is nan"
    fix = rf"{what} at step 4 \(train.nonfinite=stop\); to continue past it, run: .* resume {tmp_path}/run train.nonfinite=rollback"
    with pytest.raises(Lost, match=fix):
        trainer.train(options(tmp_path / "run"))
    assert [p.name for p in checkpoint.complete(tmp_path / "run/checkpoints")] == ["step_00000002"]
    assert len(metrics(tmp_path / "run")) == 3


def test_the_advice_works(tmp_path, monkeypatch):
    bad = []
    run = Run(monkeypatch, lambda call, w: call == 4 or any(torch.equal(run.rows[-1], rows) for rows in bad))
    cfg = options(tmp_path / "run")
    with pytest.raises(Lost):
        trainer.train(cfg)
    bad.append(run.rows[3])
    trainer.train(policy(resuming(cfg, "latest"), "rollback"))
    assert [record["step"] for record in metrics(cfg.run.dir)] == [1, 2, 3, 4, 5, 6]


def test_without_a_checkpoint_before_it_the_advice_is_another(tmp_path, monkeypatch):
    Run(monkeypatch, lambda call, w: call == 2)
    with pytest.raises(Lost, match="loss is nan at step 2 .*; start again with a lower optim.lr"):
        trainer.train(options(tmp_path / "run"))


def test_a_rollback_goes_on_with_the_data_after(tmp_path, monkeypatch, capsys):
    run = Run(monkeypatch, lambda call, w: call == 4)
    cfg = policy(options(tmp_path / "run"), "rollback")
    trainer.train(cfg)
    first = f"loss is nan at step 4; continuing from {tmp_path}/run/checkpoints/step_00000002, with the data after that step"
    assert first in capsys.readouterr().out
    assert len(run.rows) == 4 + 4
    assert torch.equal(run.weights[4], run.weights[2])  # as it was after step 2
    assert not any(torch.equal(run.rows[4], rows) for rows in run.rows[:4])
    assert [record["step"] for record in metrics(cfg.run.dir)] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in metrics(cfg.run.dir)] == [64 * n for n in range(1, 7)]
    events = [float(r["loss"]) for r in metrics(cfg.run.dir)]
    assert all(math.isfinite(loss) for loss in events)


def test_a_run_that_was_rolled_back_resumes_to_the_same_bits(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        Run(patch, lambda call, w: call == 4)
        cfg = policy(options(tmp_path / "whole", steps=8), "rollback")
        trainer.train(cfg)
    with monkeypatch.context() as patch:
        Run(patch, lambda call, w: call == 4)
        cut = policy(options(tmp_path / "cut", steps=8), "rollback")
        normal = trainer.is_due
        patch.setattr(steps, "is_due", lambda n, *rest: normal(n, *rest) if n < 7 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(cut)
    Run(monkeypatch, lambda call, w: False)
    trainer.train(resuming(cut, "latest"))
    assert timeless(metrics(cut.run.dir)) == timeless(metrics(cfg.run.dir))


def test_where_the_state_itself_is_bad_an_earlier_one_is_taken(tmp_path, monkeypatch, capsys):
    run = Run(monkeypatch, lambda call, w: call >= 5 and torch.equal(w, run.weights[4]))  # the state saved after step 4
    cfg = policy(options(tmp_path / "run"), "rollback")
    trainer.train(cfg)
    output = capsys.readouterr().out
    assert output.count("continuing from") == 2
    assert output.index("checkpoints/step_00000004, with") < output.index("checkpoints/step_00000002, with")
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step_*"))
    assert names == ["step_00000002", "step_00000004", "step_00000004.left", "step_00000006"]
    assert [record["step"] for record in metrics(cfg.run.dir)] == [1, 2, 3, 4, 5, 6]


def test_it_goes_back_so_often_and_no_more(tmp_path, monkeypatch):
    run = Run(monkeypatch, lambda call, w: call % 4 == 0)
    with pytest.raises(Lost, match="start again with"):
        trainer.train(policy(options(tmp_path / "run", steps=60), "rollback"))
    assert len(run.rows) == 4 * (1 + anomalies.MOST_ROLLED_BACK)


def test_skipped_updates_are_recorded_and_said(tmp_path, monkeypatch, capsys):
    Run(monkeypatch, lambda call, w: call in (3, 6), norm=True)
    cfg = policy(options(tmp_path / "run"), "skip")
    trainer.train(cfg)
    assert "step 3: loss is nan, grad_norm is inf; the update is skipped" in capsys.readouterr().out
    records = metrics(cfg.run.dir)
    assert ["loss" in r for r in records] == [True, True, False, True, True, False]
    assert [r.get("skipped", 0) for r in records] == [0, 0, 1, 0, 0, 1]


def test_a_state_that_may_be_bad_takes_no_place_of_one_that_is_well(tmp_path, monkeypatch):
    Run(monkeypatch, lambda call, w: 4 <= call <= 5, norm=True)
    cfg = policy(options(tmp_path / "run"), "skip")
    trainer.train(replace(cfg, checkpoint=replace(cfg.checkpoint, interval=1)))
    names = [p.name for p in checkpoint.complete(tmp_path / "run/checkpoints")]
    assert names == [f"step_{n:08}" for n in (1, 2, 3, 6)]


def test_a_loss_that_is_lost_though_its_gradient_is_not_stops(tmp_path, monkeypatch):
    Run(monkeypatch, lambda call, w: call == 3)
    with pytest.raises(Lost, match="loss is nan at step 3"):
        trainer.train(policy(options(tmp_path / "run"), "skip"))


def test_too_many_in_a_row_stop(tmp_path, monkeypatch):
    run = Run(monkeypatch, lambda call, w: call > 5, norm=True)
    with pytest.raises(Lost, match=f"grad_norm is inf, the {anomalies.MOST_SKIPPED}th time in a row, at step 15"):
        trainer.train(policy(options(tmp_path / "run", steps=40), "skip"))
    assert len(run.rows) == 15


def test_a_rollback_needs_checkpoints(tmp_path):
    cfg = policy(options(tmp_path / "run"), "rollback")
    with pytest.raises(UserError, match="train.nonfinite: rollback with checkpoint.interval=null"):
        validate(replace(cfg, checkpoint=replace(cfg.checkpoint, interval=None)), 1)
