"""torchrun starts ranks again after one was killed, and the run goes on by itself to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from short_runs import metrics, timeless

from compiler_trainer.checkpoint import complete

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "model.dim=32 model.n_layers=2 model.n_heads=2 model.n_kv_heads=2 data=synthetic train.seq_len=64 "
    "train.global_batch_size=8 train.steps=150 train.deterministic=true lower.backend=eager run.dump_graphs=false "
    "passes.verify=off checkpoint.interval=10 checkpoint.resume=auto"
)
DEADLINE_S = 200


def torchrun(folder: Path) -> subprocess.Popen:
    """A job of two ranks whose ranks may be started again twice."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*start, "-m", "compiler_trainer", *OPTIONS.split(), f"run.dir={folder}"]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def steps_of(folder: Path) -> int:
    """How many steps a run has recorded."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.full
def test_a_killed_rank_costs_steps_and_nothing_else(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert torchrun(whole).wait(DEADLINE_S) == 0
    job, deadline = torchrun(cut), time.monotonic() + DEADLINE_S
    while steps_of(cut) < 35:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    ranks = [p for p in psutil.Process(job.pid).children() if "compiler_trainer" in p.cmdline()]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    _, said = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, said[-4000:]
    assert "exitcode: -9" in said
    assert timeless(metrics(cut)) == timeless(metrics(whole))
    for of_whole, of_cut in zip(complete(whole / "checkpoints"), complete(cut / "checkpoints"), strict=True):
        for rank in ("rank_00000", "rank_00001"):
            found, wanted = (load_file(path / f"{rank}.safetensors") for path in (of_cut, of_whole))
            assert found.keys() == wanted.keys() and all((found[n] == wanted[n]).all() for n in wanted)
