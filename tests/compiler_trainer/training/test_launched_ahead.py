"""On a GPU, each step is launched before the previous one's results are read; here the CPU plays the GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from short_runs import FakeStep, metrics, options, resuming, timeless
from torch.utils._python_dispatch import TorchDispatchMode

import compiler_trainer as ct
from compiler_trainer import checkpoint
from compiler_trainer.config.schema import CheckpointConfig, EvalConfig
from compiler_trainer.step.results import Results
from compiler_trainer.training import steps, trainer


class Log(FakeStep):
    """A step that records when it is launched, and when its results are read."""

    lines: list = []

    def launch(self, batch, lr):
        results, number = super().launch(batch, lr), sum(line.startswith("launch") for line in self.lines) + 1
        self.lines.append(f"launch {number}")
        read = results.read

        def noted():
            if f"read {number}" not in self.lines:
                self.lines.append(f"read {number}")
            return read()

        results.read = noted
        return results


@pytest.fixture
def lines(monkeypatch):
    """Return the log of a trainer around `Log`, on a device that is asynchronous to the host."""
    monkeypatch.setattr(trainer, "compile_step", Log)
    monkeypatch.setattr(steps, "ASYNCHRONOUS", ("cpu",))
    Log.lines.clear()
    return Log.lines


def quiet(folder, count=6, **changes):
    """Return a run of steps without evaluations or checkpoints."""
    settings = {"eval": EvalConfig(interval=None), "checkpoint": CheckpointConfig(interval=None)} | changes
    return options(folder, steps=count, **settings)


def test_each_step_is_launched_before_the_one_before_is_read(lines, tmp_path):
    trainer.train(quiet(tmp_path / "run", 4))
    assert lines == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4"]
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_step_is_read_in_time_where_something_looks_at_the_state_after_it(lines, tmp_path):
    trainer.train(quiet(tmp_path / "run", 6, eval=EvalConfig(interval=2, batches=1), checkpoint=CheckpointConfig(interval=3)))
    assert lines == ["launch 1", "launch 2", "read 1", "read 2", "launch 3", "read 3", "launch 4", "read 4", "launch 5", "launch 6",
                     "read 5", "read 6"]


class Weight(ct.Callback):
    """A callback that keeps the weight after each step."""

    def __init__(self):
        self.seen = []

    def on_step(self, run, record):
        self.seen.append(float(run.step.state["model.w"].local[0][0]))


def test_a_callback_sees_the_state_of_its_step(lines, tmp_path, monkeypatch):
    ahead, behind = Weight(), Weight()
    trainer.train(quiet(tmp_path / "ahead"), callbacks=[ahead])
    monkeypatch.setattr(steps, "ASYNCHRONOUS", ())
    trainer.train(quiet(tmp_path / "behind"), callbacks=[behind])
    assert ahead.seen == behind.seen and len(set(ahead.seen)) == 6


def test_records_and_checkpoints_are_those_of_a_host_that_waits(lines, tmp_path, monkeypatch):
    trainer.train(ahead := options(tmp_path / "ahead", steps=7))
    monkeypatch.setattr(steps, "ASYNCHRONOUS", ())
    trainer.train(behind := options(tmp_path / "behind", steps=7))
    assert timeless(metrics(ahead.run.dir)) == timeless(metrics(behind.run.dir))
    for number in (2, 4, 6, 7):
        pair = [checkpoint.opened(tmp_path / name / f"checkpoints/step_{number:08}").index for name in ("ahead", "behind")]
        assert pair[0].step == pair[1].step and pair[0].tokens == pair[1].tokens and pair[0].data == pair[1].data


class Stops(ct.Callback):
    """A callback that ends the run at an evaluation."""

    def on_evaluation(self, run, record):
        run.stop("enough")


def test_a_run_ends_after_the_step_that_was_launched(lines, tmp_path):
    cfg = quiet(tmp_path / "run", checkpoint=CheckpointConfig(interval=50))
    with pytest.raises(SystemExit):
        trainer.train(replace(cfg, run=replace(cfg.run, time_limit=1e-9)))
    assert [record["step"] for record in metrics(cfg.run.dir)] == [1, 2]
    assert [p.name for p in (tmp_path / "run/checkpoints").glob("step_*")] == ["step_00000002"]
    trainer.train(resuming(cfg, "latest"))
    assert [record["step"] for record in metrics(cfg.run.dir)] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_may_end_it(lines, tmp_path):
    cfg = quiet(tmp_path / "run", eval=EvalConfig(interval=3, batches=1))
    trainer.train(cfg, callbacks=[Stops()])
    assert len(metrics(cfg.run.dir)) == 3 and lines[-1] == "read 3"


def test_after_a_loss_that_is_lost_the_data_go_on_behind_its_step(lines, tmp_path, monkeypatch):
    taken, calls = {}, []

    class Broken(Log):
        def __call__(self, batch, lr):
            calls.append(batch["tokens"].sum().item())
            result = super().__call__(batch, lr)
            return {**result, "loss": math.nan} if len(calls) == 3 else result

    monkeypatch.setattr(trainer, "compile_step", Broken)
    for name, device in (("ahead", "cpu"), ("behind", "no")):
        monkeypatch.setattr(steps, "ASYNCHRONOUS", (device,))
        calls.clear()
        cfg = quiet(tmp_path / name, checkpoint=CheckpointConfig(interval=2))
        trainer.train(replace(cfg, train=replace(cfg.train, nonfinite="rollback")))
        taken[name] = list(calls)
    launched_too_early = taken["ahead"].pop(3)
    assert taken["ahead"] == taken["behind"] and taken["behind"][3] == launched_too_early


class Reads(TorchDispatchMode):
    """A mode that records the host's reads of values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            Log.lines.append("scalar")
        return func(*args, **(kwargs or {}))


def test_a_launch_reads_nothing_of_the_device():
    from oracle import compile_lockstep, perceptron, points, squared_error

    data, model = points(), perceptron()
    step = compile_lockstep(model, squared_error, data[0], {"dp_shard": 2}, skip_nonfinite=True)
    Log.lines.clear()
    with Reads():
        results = step.launch(data[0], 0.1)
    assert isinstance(results, Results) and Log.lines == []
    assert results.read() == results.read() and results.read().keys() >= {"loss", "grad_norm"}
