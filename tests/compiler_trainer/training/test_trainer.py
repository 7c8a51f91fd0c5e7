"""A run's output, resuming without changes, and refused input that leaves no trace."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from commands import call
from printed_programs import joint
from short_runs import MODEL, FakeStep, metrics, no_file_above, options, resuming, timeless

from compiler_trainer import checkpoint
from compiler_trainer.config import schema as config
from compiler_trainer.config.device import for_running
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    RunConfig,
)
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import build_datasets
from compiler_trainer.step.step import State
from compiler_trainer.training import prepare, steps, trainer
from compiler_trainer.training.lr_schedule import learning_rate
from passes.check.runner import PassRecord
from passes.cost.accounting import Accounting
from passes.cost.costs import Costs
from passes.ir.ir import Report
from passes.ir.spec import Spec


@pytest.fixture
def fake(monkeypatch):
    """Train around `FakeStep`."""
    monkeypatch.setattr(trainer, "compile_step", FakeStep)


# The loop


def test_what_is_recorded(fake, tmp_path):
    cfg = options(tmp_path / "run")
    trainer.train(cfg)
    records = metrics(cfg.run.dir)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [64 * step for step in range(1, 7)]
    assert [record["lr"] for record in records] == [learning_rate(cfg.lr_schedule, 1e-2, s, 6) for s in range(1, 7)]
    assert ["eval_loss" in record for record in records] == [False, False, False, True, False, True]
    for record in records:
        assert record["tokens_per_s"] * record["step_ms"] == pytest.approx(64e3)
        assert record["peak_mem_bytes"] >= 12
        assert 0 < record["data_ms"] < record["step_ms"]


def test_padding_counts_as_no_token(fake, tmp_path):
    cfg = options(tmp_path / "run", data=DataConfig("synthetic", documents=40, packing="fit"))
    cfg = replace(cfg, train=replace(cfg.train, seq_len=600))
    trainer.train(cfg)
    loader = build_datasets(cfg.data, 600, 4).train
    counts = [(loader.next(), loader.token_count)[1] for _ in range(6)]
    records = metrics(cfg.run.dir)
    assert [record["tokens"] for record in records] == list(itertools.accumulate(counts))
    assert all(0 < count < 2400 for count in counts)
    for record, count in zip(records, counts, strict=True):
        assert record["tokens_per_s"] * record["step_ms"] == pytest.approx(1e3 * count)
    (source,) = json.loads((tmp_path / "run/report.json").read_text())["data"]
    assert source["source"] == "synthetic" and 0 < source["padding"] < 0.5


def test_evaluation_is_on_the_same_held_out_rows(fake, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(steps, "means", lambda step, batches: seen.append(list(batches)) or ({"loss": 1.0}, 1))
    trainer.train(options(tmp_path / "run"))
    first, second = seen
    assert len(first) == 2
    first, second = ([batch["tokens"] for _, batch in batches] for batches in (first, second))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and not torch.equal(*first)


def test_a_model_that_has_weights_is_evaluated_before_its_first_step(fake, tmp_path, monkeypatch, capsys):
    built = trainer.subject
    monkeypatch.setattr(trainer, "subject", lambda cfg: replace(built(cfg), has_weights=True))
    cfg = options(tmp_path / "run", optim=config.OptimConfig(lr=0.0))
    trainer.train(cfg)
    last = metrics(cfg.run.dir)[-1]["eval_loss"]
    assert f"\neval loss {last:.3f} before the first step\n" in capsys.readouterr().out
    trainer.train(resuming(replace(cfg, train=replace(cfg.train, steps=8)), "latest"))
    assert "before the first step" not in capsys.readouterr().out
    trainer.train(options(tmp_path / "never", eval=config.EvalConfig(interval=None)))
    assert "eval loss" not in capsys.readouterr().out


def test_checkpoints_are_taken_and_kept(fake, tmp_path):
    cfg = options(tmp_path / "run", steps=7)
    trainer.train(replace(cfg, checkpoint=replace(cfg.checkpoint, keep=2)))
    assert [p.name for p in checkpoint.complete(tmp_path / "run/checkpoints")] == ["step_00000006", "step_00000007"]
    saved = checkpoint.opened(tmp_path / "run/checkpoints/step_00000006").index
    assert (saved.step, saved.tokens, saved.data["taken"]) == (6, 6 * 64, [24])
    assert saved.config["train"]["seq_len"] == 16


def test_switched_off(fake, tmp_path):
    changes = {"checkpoint": CheckpointConfig(interval=None), "eval": EvalConfig(interval=None)}
    trainer.train(options(tmp_path / "run", run=RunConfig(str(tmp_path / "run"), dump_graphs=False), **changes))
    assert not any("eval_loss" in record for record in metrics(tmp_path / "run"))
    assert not {"checkpoints", "graphs"} & {p.name for p in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(("interval", "evaluates"), [(4, True), (None, False)])
def test_evaluation_is_compiled_only_where_the_run_evaluates(interval, evaluates, tmp_path, monkeypatch):
    requests = []
    monkeypatch.setattr(trainer, "compile_step", lambda *args, evaluate, **how: requests.append(evaluate) or FakeStep(*args))
    trainer.train(options(tmp_path / "run", eval=EvalConfig(interval=interval)))
    assert requests == [evaluates]


# Resuming


@pytest.mark.parametrize("packing", ["cut", "fit"])
def test_interrupted_and_resumed_equals_uninterrupted(packing, fake, tmp_path, monkeypatch):
    data = DataConfig("synthetic", documents=40, packing=packing)
    whole, cut = options(tmp_path / "whole", data=data), options(tmp_path / "cut", data=data)
    trainer.train(whole)
    with monkeypatch.context() as patch:
        normal = trainer.is_due
        patch.setattr(steps, "is_due", lambda n, *rest: normal(n, *rest) if n < 6 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train(cut)
    assert len(metrics(cut.run.dir)) == 5
    trainer.train(resuming(cut, "latest"))
    assert timeless(metrics(cut.run.dir)) == timeless(metrics(whole.run.dir))


def test_going_on_in_another_folder(fake, tmp_path):
    trainer.train(options(tmp_path / "first"))
    trainer.train(resuming(options(tmp_path / "second"), tmp_path / "first/checkpoints/step_00000004"))
    assert timeless(metrics(tmp_path / "second")) == timeless(metrics(tmp_path / "first"))[4:]


# Refusals


def refusal(cfg):
    """Return the one line that refuses `cfg`, and check that nothing on disk changed."""
    folder = Path(cfg.run.dir).parent
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as caught:
        trainer.train(cfg)
    assert sorted(folder.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text_options(folder, *files):
    return options(folder / "run", data=DataConfig(name="text", files=tuple(map(str, files))))


def test_input_that_cannot_be_read_leaves_nothing(fake, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    assert "nowhere.txt" in refusal(text_options(tmp_path, tmp_path / "nowhere.txt"))
    assert "empty" in refusal(text_options(tmp_path, tmp_path / "empty.txt"))
    assert "latin.txt" in refusal(text_options(tmp_path, tmp_path / "latin.txt"))


def test_too_small_a_vocabulary_leaves_nothing(fake, tmp_path):
    assert refusal(options(tmp_path / "run", model=replace(MODEL, vocab_size=200))).startswith("model.vocab_size")


def test_a_mesh_for_other_ranks_leaves_nothing(fake, tmp_path):
    cfg = options(tmp_path / "run")
    assert refusal(replace(cfg, mesh=replace(cfg.mesh, dp_shard=3))).startswith("mesh")


def test_a_checkpoint_that_is_not_there_leaves_nothing(fake, tmp_path):
    cfg = options(tmp_path / "run")
    assert refusal(resuming(cfg, "latest")).startswith("checkpoint.resume")
    assert "nowhere" in refusal(resuming(cfg, tmp_path / "nowhere"))


def test_a_checkpoint_that_does_not_fit_leaves_nothing(fake, tmp_path):
    trainer.train(options(tmp_path / "first"))
    last = tmp_path / "first/checkpoints/step_00000006"
    assert "is at step 6" in refusal(resuming(options(tmp_path / "run"), last))
    other = resuming(options(tmp_path / "run", data=DataConfig(name="synthetic", documents=41), steps=9), last)
    assert refusal(other).startswith("data")


def test_a_checkpoint_of_another_model_leaves_nothing(fake, tmp_path, monkeypatch):
    trainer.train(options(tmp_path / "first"))

    class Bigger(FakeStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args)
            self.state = {"model.w": State(Spec.whole((4,)), {0: torch.ones(4)}, torch.ones(4))}

    monkeypatch.setattr(trainer, "compile_step", Bigger)
    cfg = resuming(options(tmp_path / "run", steps=9), tmp_path / "first/checkpoints/step_00000006")
    assert "model.w is float32[3] there and float32[4] here" in refusal(cfg)


def test_an_earlier_run_is_not_written_over(fake, tmp_path):
    trainer.train(options(tmp_path / "run"))
    assert refusal(options(tmp_path / "run")).startswith("run.dir")
    (tmp_path / "file").touch()
    assert refusal(options(tmp_path / "file")).startswith("run.dir")
    cfg = options(tmp_path / "other")
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, dir=str(tmp_path / "run/checkpoints")))
    assert refusal(cfg).startswith("checkpoint.dir")
    assert refusal(resuming(cfg, tmp_path / "run/checkpoints/step_00000004")).startswith("checkpoint.dir")


def test_what_the_compiler_refuses_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*args, observe, **kwargs):
        raise UserError("passes.shard.plan", "no parameter is named like no.such.*")

    monkeypatch.setattr(trainer, "compile_step", refuse)
    assert refusal(options(tmp_path / "run")).startswith("passes.shard.plan")


@pytest.mark.parametrize("why", [RuntimeError("a pass went wrong"), KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_a_compilation_that_ends_early_keeps_its_graphs_and_what_reads_them_needs(why, tmp_path, monkeypatch):
    nothing = Accounting((), {}, 0, 0, 0, "x", "", {})

    def fail(*args, observe, **kwargs):
        observe(joint({"tp": 2}), PassRecord("step", "joint", 0.0, 0, 0, Report(), nothing, costs=Costs((), (), ())))
        raise why

    cfg = options(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "compile_step", fail)
        with pytest.raises(type(why)):
            trainer.train(cfg)
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"config.yaml", "graphs", "report.json"}
    assert call("inspect", tmp_path / "run") == 0
    monkeypatch.setattr(trainer, "compile_step", FakeStep)
    assert call("resume", tmp_path / "run") == 0 and len(metrics(tmp_path / "run")) == 6


def test_sigterm_while_a_run_compiles_leaves_what_resume_needs(tmp_path, monkeypatch, capsys):
    def interrupted(*args, observe, **how):
        nothing = Accounting((), {}, 0, 0, 0, "x", "", {})
        observe(joint({"tp": 2}), PassRecord("step", "joint", 0.0, 0, 0, Report(), nothing, costs=Costs((), (), ())))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(trainer, "compile_step", interrupted)
    with pytest.raises(SystemExit) as ended:
        trainer.train(options(tmp_path / "run"))
    assert ended.value.code == 3 and signal.getsignal(signal.SIGTERM) is before
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"config.yaml", "graphs", "report.json"}
    assert "SIGTERM while compiling: no step was taken" in capsys.readouterr().out


def test_a_run_that_goes_on_and_ends_while_it_compiles_keeps_its_options(fake, tmp_path, monkeypatch):
    trainer.train(options(tmp_path / "run"))
    monkeypatch.setattr(trainer, "compile_step", lambda *args, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(resuming(options(tmp_path / "run", steps=9), "latest"))
    assert config.load(tmp_path / "run/config.yaml").train.steps == 6


def test_a_disk_that_does_not_take_the_graphs_is_one_line(tmp_path, monkeypatch, capsys):
    nothing = Accounting((), {}, 0, 0, 0, "x", "", {})

    def compiled(*args, observe, **kwargs):
        with no_file_above(100):
            for name in ("forward", "step"):
                observe(joint({"tp": 2}), PassRecord(name, "joint", 0.0, 0, 0, Report(), nothing, {}))
        return FakeStep(*args)

    monkeypatch.setattr(trainer, "compile_step", compiled)
    trainer.train(options(tmp_path / "run"))
    assert len(metrics(tmp_path / "run")) == 6 and not (tmp_path / "run/graphs").exists()
    assert capsys.readouterr().out.count("graphs cannot be written (File too large): no graphs are saved") == 1


# Agreement


class Rows:
    """Data as read by a rank."""

    def __init__(self, fingerprint):
        self.train = self.rows = self
        self.fingerprint = fingerprint


@pytest.fixture
def rank_0(monkeypatch):
    """Return a function that plays a broadcast from a rank 0 with other values."""

    def play(*values):
        monkeypatch.setattr(prepare, "from_rank_0", lambda value: values)
        monkeypatch.setattr(prepare, "rank", lambda: 1)

    return play


def test_all_ranks_write_where_rank_0_does(rank_0):
    rank_0(options("one"), "abc")
    assert prepare.same_on_all_ranks(options("two"), Rows("abc")) == options("one")


def test_ranks_that_differ_are_refused(rank_0):
    rank_0(options("one"), "abc")
    with pytest.raises(UserError, match="^train: .*'steps': 7.*'steps': 6"):
        prepare.same_on_all_ranks(options("one", steps=7), Rows("abc"))
    with pytest.raises(UserError, match="^data: "):
        prepare.same_on_all_ranks(options("one"), Rows("abd"))


# Compiled


def test_a_compiled_run_learns_and_goes_on_bit_for_bit(tmp_path, capsys):
    whole = options(tmp_path / "whole", steps=30)
    trainer.train(whole)
    records = metrics(whole.run.dir)
    assert records[0]["loss"] == pytest.approx(math.log(MODEL.vocab_size), rel=0.02)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    assert {p.name for p in (tmp_path / "whole").iterdir() if "tfevents" not in p.name} == {
        ".owner", "checkpoints", "config.yaml", "graphs", "metrics.jsonl", "report.json", "status.json",
    }
    assert config.load(tmp_path / "whole/config.yaml") == validate(for_running(whole), 1)
    assert yaml.safe_load((tmp_path / "whole/config.yaml").read_text())["train"]["steps"] == 30
    assert json.loads((tmp_path / "whole/report.json").read_text())["passes"]
    assert list((tmp_path / "whole/graphs").glob("*.txt"))
    assert f"{tmp_path / 'whole'}:" in capsys.readouterr().out

    trainer.train(resuming(options(tmp_path / "rest", steps=30), tmp_path / "whole/checkpoints/step_00000024"))
    assert timeless(metrics(tmp_path / "rest")) == timeless(records)[24:]
