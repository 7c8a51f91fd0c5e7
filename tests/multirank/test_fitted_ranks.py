"""Rows packed with whole documents give the same losses and tokens on one rank and resumed on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from short_runs import metrics

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "model.dim=32 model.n_layers=1 model.n_heads=2 model.n_kv_heads=2 model.attention=documents data=synthetic "
    "data.documents=200 data.packing=fit train.seq_len=600 train.global_batch_size=4 lr_schedule=constant eval.interval=3 "
    "lower.backend=eager run.dump_graphs=false"
)


def run(ranks: int, *arguments: str) -> None:
    """Run the command on a number of ranks; raise CalledProcessError if it fails."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *start, "-m", "compiler_trainer", *arguments]
    subprocess.run(command, env=env, check=True, timeout=200, capture_output=True)


@pytest.mark.full
def test_fitted_rows_go_on_exactly_on_more_ranks(tmp_path):
    whole, first = tmp_path / "whole", tmp_path / "first"
    run(1, *OPTIONS.split(), "train.steps=6", f"run.dir={whole}")
    run(1, *OPTIONS.split(), "train.steps=3", f"run.dir={first}")
    run(2, "resume", str(first), "train.steps=6", "mesh.dp_shard=2")
    for wanted, record in zip(metrics(whole), metrics(first), strict=True):
        assert record["tokens"] == wanted["tokens"] < 2400 * record["step"]
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert record.get("eval_loss", 0.0) == pytest.approx(wanted.get("eval_loss", 0.0), rel=1e-5)
