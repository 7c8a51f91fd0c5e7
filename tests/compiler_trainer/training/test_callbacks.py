"""Callbacks run for each step, evaluation, checkpoint and end, on every rank, and any of them may end the run."""

from __future__ import annotations

import math
import signal
import threading
import time
from dataclasses import replace

import pytest
from short_runs import FakeStep, metrics, options, resuming

import compiler_trainer as ct
from compiler_trainer import checkpoint
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import EvalConfig, RunConfig
from compiler_trainer.training import trainer
from compiler_trainer.training.stop import Stop


@pytest.fixture
def fake(monkeypatch):
    """Train around `FakeStep`."""
    monkeypatch.setattr(trainer, "compile_step", FakeStep)


class Diary(ct.Callback):
    """A callback that records its calls in a list shared by all callbacks."""

    events: list = []

    def __init__(self, stops_at=0):
        self.stops_at = stops_at
        self.events.clear()

    def on_start(self, run):
        self.events.append(f"start after {run.done} in {run.folder.name} on {run.rank}")

    def on_step(self, run, record):
        self.events.append(f"step {record['step']}")
        if record["step"] == self.stops_at:
            run.stop("enough")

    def on_evaluation(self, run, record):
        self.events.append(f"evaluation {record['step']} {math.isfinite(record['eval_loss'])}")

    def on_checkpoint(self, run, path):
        assert checkpoint.opened(path).index.step == checkpoint.number_of(path)
        self.events.append(f"checkpoint {path.name}")

    def on_stop(self, run):
        self.events.append("stop")


def with_diary(cfg, **arguments):
    return replace(cfg, train=replace(cfg.train, callbacks=({"_target_": "test_callbacks.Diary", **arguments},)))


def test_what_is_told(fake, tmp_path):
    trainer.train(with_diary(options(tmp_path / "run")))
    beside = [line for line in Diary.events if not line.startswith("checkpoint")]
    assert beside == ["start after 0 in run on 0", "step 1", "step 2", "step 3", "step 4", "evaluation 4 True", "step 5", "step 6",
                      "evaluation 6 True", "stop"]
    assert [line for line in Diary.events if line.startswith("checkpoint")] == [f"checkpoint step_0000000{n}" for n in (2, 4, 6)]
    assert Diary.events.index("checkpoint step_00000002") > Diary.events.index("step 2")
    assert Diary.events[-2:] == ["checkpoint step_00000006", "stop"]


def test_one_that_asks_ends_the_run_with_a_checkpoint(fake, tmp_path, capsys):
    cfg = with_diary(options(tmp_path / "run"), stops_at=3)
    trainer.train(cfg)
    assert "ended after step 3 of 6: enough\n" in capsys.readouterr().out
    assert Diary.events[-2:] == ["checkpoint step_00000003", "stop"] and len(metrics(tmp_path / "run")) == 3
    trainer.train(resuming(cfg, "latest"))
    assert Diary.events[:2] == ["start after 3 in run on 0", "step 4"] and len(metrics(tmp_path / "run")) == 6


def test_a_signal_and_the_time_limit_end_it_too(fake, tmp_path):
    cfg = with_diary(options(tmp_path / "run"))
    with pytest.raises(SystemExit) as end:
        trainer.train(replace(cfg, run=replace(cfg.run, time_limit=1e-9)))
    assert end.value.code == 3 and Diary.events[-3:] == ["step 1", "checkpoint step_00000001", "stop"]


def test_of_several_reasons_that_of_a_callback_counts():
    with Stop(RunConfig(time_limit=1e-9), time.monotonic() - 1) as stop:
        stop.note(signal.SIGTERM, None)
        assert stop.is_last_step() and not stop.is_wish and str(stop) == "SIGTERM"
        stop.ask("enough")
        stop.ask("more than that")
        assert stop.is_last_step() and stop.is_wish and stop.callback_reason == "enough"


def test_without_signals_to_handle_nothing_is_left_of_the_watch():
    woken, threads = signal.set_wakeup_fd(-1), threading.active_count()
    with Stop(RunConfig(stop_signals=()), time.monotonic()):
        pass
    assert threading.active_count() == threads and signal.set_wakeup_fd(woken) == -1


def test_a_rollback_takes_steps_again(fake, tmp_path, monkeypatch):
    steps = []

    class Numbers(ct.Callback):
        def on_step(self, run, record):
            steps.append(record["step"])

    losses = iter([1.0, 2.0, 3.0, math.nan])

    class Lost(FakeStep):
        def __call__(self, batch, lr):
            return {**super().__call__(batch, lr), "loss": next(losses, 4.0)}

    monkeypatch.setattr(trainer, "compile_step", Lost)
    cfg = options(tmp_path / "run", eval=EvalConfig(interval=None))
    trainer.train(replace(cfg, train=replace(cfg.train, nonfinite="rollback")), callbacks=[Numbers()])
    assert steps == [1, 2, 3, 3, 4, 5, 6]


def test_what_one_raises_ends_the_run(fake, tmp_path):
    class Broken(ct.Callback):
        def on_step(self, run, record):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainer.train(options(tmp_path / "run"), callbacks=[Broken()])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"_target_": "collections.Counter"}, r"^train.callbacks\[0\]: collections.Counter makes a Counter, which is not a compiler_trainer.Callback"),
        ({"_target_": "test_callbacks.Diary", "stop": 3}, r"^train.callbacks\[0\]._target_: TypeError: .*stop"),
    ],
)
def test_what_is_none_is_refused_before_anything_is_written(own, message, fake, tmp_path):
    cfg = options(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        trainer.train(replace(cfg, train=replace(cfg.train, callbacks=(own,))))
    assert not (tmp_path / "run").exists()
