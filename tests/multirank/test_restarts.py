"""torchrun restarts the ranks on all nodes after a kill, and the run resumes by itself to the same bits."""

from __future__ import annotations

import os
import signal
import socket
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
    "passes.verify=none checkpoint.interval=10 checkpoint.resume=auto"
)
DEADLINE_S = 200


def torchruns(folder: Path, nodes: int) -> list[subprocess.Popen]:
    """Start a job of two ranks on one or two nodes that may restart its ranks twice."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"]
    start += ["--max-restarts=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=restarts"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*start, "-m", "compiler_trainer", *OPTIONS.split(), f"run.dir={folder}"]
    return [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(nodes)]


def wait_for_success(jobs: list[subprocess.Popen]) -> str:
    """Wait for a job, require that it succeeds, and return its stderr."""
    outputs = [job.communicate(timeout=DEADLINE_S)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), "\n".join(outputs)[-4000:]
    return "\n".join(outputs)


def steps_of(folder: Path) -> int:
    """Return the number of steps that a run has recorded."""
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.full
@pytest.mark.parametrize("nodes", (1, 2))
def test_a_killed_rank_costs_steps_and_nothing_else(nodes, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    wait_for_success(torchruns(whole, nodes))
    jobs, deadline = torchruns(cut, nodes), time.monotonic() + DEADLINE_S
    while steps_of(cut) < 35:
        assert time.monotonic() < deadline and all(job.poll() is None for job in jobs)
        time.sleep(0.02)
    ranks = [p for job in jobs for p in psutil.Process(job.pid).children() if "compiler_trainer" in p.cmdline()]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert "exitcode: -9" in wait_for_success(jobs)
    assert timeless(metrics(cut)) == timeless(metrics(whole))
    for of_whole, of_cut in zip(complete(whole / "checkpoints"), complete(cut / "checkpoints"), strict=True):
        for rank in ("rank_00000", "rank_00001"):
            stored, wanted = (load_file(path / f"{rank}.safetensors") for path in (of_cut, of_whole))
            assert stored.keys() == wanted.keys() and all((stored[n] == wanted[n]).all() for n in wanted)
