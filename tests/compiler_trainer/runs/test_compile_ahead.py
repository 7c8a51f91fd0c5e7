"""Ahead-of-time programs: the job runs the programs that `compile` writes, and no other job does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from commands import call

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.validate import validate
from compiler_trainer.models.subject import subject
from compiler_trainer.runs.ahead import compile_ahead
from compiler_trainer.step import programs
from compiler_trainer.step.compile import compile_step
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.training.prepare import read_data
from compiler_trainer.training.trainer import peek

SMALL = (
    "model.dim=16 model.n_layers=2 model.n_heads=2 model.n_kv_heads=1 model.ffn_dim=24 train.seq_len=16 train.steps=2 "
    "mesh.dp_shard=1 "
    "data=synthetic data.documents=400 lower.backend=eager checkpoint.interval=null"
).split()


@pytest.fixture
def untraced(monkeypatch):
    """Return a function that forbids tracing from its call on."""

    def never(*_):
        raise AssertionError("traced")

    return lambda: monkeypatch.setattr(programs, "run_rows", never)


def test_a_job_runs_what_was_made_ahead_and_says_so(tmp_path, capsys, untraced):
    assert call("compile", *SMALL, "cluster=cpu", "--out", tmp_path / "made") == 0
    assert f"start the job with lower.programs={tmp_path / 'made'}" in capsys.readouterr().out
    untraced()
    shutil.move(tmp_path / "made", tmp_path / "copied")
    run = tmp_path / "run"
    assert call(*SMALL, f"lower.programs={tmp_path / 'copied'}", f"run.dir={run}", "optim.lr=0.01") == 0
    stored = json.loads((run / "report.json").read_text())["program"]
    assert stored["read"] and stored["from"] == str(tmp_path / "copied") and (run / "graphs").is_dir()
    said = capsys.readouterr().out
    assert f"program {stored['stored_as'][:12]}, compiled ahead, was loaded from {tmp_path / 'copied'}\n" in said
    assert (run / "config.yaml").read_text().startswith(f"# program {stored['stored_as']}\n")
    assert call("inspect", run) == 0
    assert f"program {stored['stored_as']}, read from {tmp_path / 'copied'}" in capsys.readouterr().out.replace("\n", " ")


OTHERS = {
    "optim.max_norm=0.5": "optim is ",
    "train.global_batch_size=8": "batch is ",
    "model.n_layers=1": "parameters is ",
    "passes.remat.policy=full": "passes is ",
}


@pytest.mark.full
def test_another_job_is_refused_with_what_differs(tmp_path, capsys):
    assert call("compile", *SMALL, "cluster=cpu", "--out", tmp_path / "made") == 0
    for option, differs in OTHERS.items():
        assert call(*SMALL, f"lower.programs={tmp_path / 'made'}", f"run.dir={tmp_path / 'run'}", option) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"error: lower.programs: {tmp_path / 'made'} contains the program of another job: "), said
        assert differs in said and (said.count(" here") == 1 or "model is" in said), said
    for path in (tmp_path / "made").iterdir():
        path.unlink()
    assert call(*SMALL, f"lower.programs={tmp_path / 'made'}", f"run.dir={tmp_path / 'run'}") == 2
    assert "contains no program" in capsys.readouterr().err
    assert call(*SMALL, f"lower.programs={tmp_path / 'none'}", f"run.dir={tmp_path / 'run'}") == 2
    assert "there is no folder" in capsys.readouterr().err


def stepped(cfg, cache):
    """Return the loss of a first step on all ranks of a mesh, and the report."""
    cfg = validate(for_predicting(cfg), cfg.mesh.dp_shard)
    datasets, trained = read_data(cfg), subject(cfg)
    step = compile_step(
        trained.module, trained.loss, batch := peek(datasets.train), mesh=cfg.mesh, optim=cfg.optim, passes=cfg.passes,
        lower=cfg.lower, skip_nonfinite=cfg.train.nonfinite == "skip", initial=trained.initial(), below=datasets.below,
        ranks="lockstep", cache=cache,
    )  # fmt: skip
    return step(batch)["loss"], step.report["program"]


@pytest.mark.full
def test_sixty_four_ranks_run_what_one_process_made_and_trace_nothing(tmp_path, untraced):
    cfg = to_config(compose([*SMALL, "cluster=cpu", "mesh.dp_shard=64", "train.global_batch_size=64"]))
    alone, _ = stepped(replace(cfg, mesh=replace(cfg.mesh, dp_shard=1)), None)
    said = compile_ahead(cfg, tmp_path / "made", lambda what: None)
    assert "for 64 ranks on cpu " in said
    untraced()
    loss, stored = stepped(cfg, ProgramCache.of(replace(cfg.lower, programs=str(tmp_path / "made"))))
    assert stored["read"] and loss == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_programs_for_gpus_are_made_without_one(tmp_path):
    command = [sys.executable, "-m", "compiler_trainer", "compile", *SMALL, "cluster=h100", "mesh.dp_shard=8"]
    command += ["train.global_batch_size=8", "--out", str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "for 8 ranks on NVIDIA H100 80GB HBM3" in done.stdout, done.stderr


def test_clean_bounds_the_cache_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "programs").mkdir()
    for name, age_s in {"old": 9 * 86_400, "older": 10 * 86_400, "new": 0}.items():
        (tmp_path / "programs" / name).write_bytes(bytes(2**20))
        os.utime(tmp_path / "programs" / name, (time.time() - age_s,) * 2)
    assert call("clean", "--gib", 2 / 1024) == 0
    assert {path.name for path in (tmp_path / "programs").iterdir()} == {"old", "new"}
    said = capsys.readouterr().out
    assert "the oldest 1 MiB were deleted" in said and "holds 2 MiB, 2 of them programs" in said
