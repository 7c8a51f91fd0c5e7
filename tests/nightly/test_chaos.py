"""A run that is killed and restarted ends with the bits of an undisturbed one; other bits are reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import chaos

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_a_killed_run_ends_with_the_same_bits():
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.nightly.chaos", "--trials", "1", "--seed", "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0, another in its folder: the same bits" in done.stdout and "0 with other bits" in done.stdout


@pytest.mark.full
def test_other_bits_are_told(tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "other"
    chaos.train(chaos.job(whole))
    shutil.copytree(whole, other)
    assert chaos.differences(whole, other) == []
    shutil.rmtree(other)
    assert chaos.differences(whole, other) == ["the run did not end"]
    cfg = chaos.job(other)
    chaos.train(chaos.replace(cfg, train=chaos.replace(cfg.train, seed=1)))
    names = chaos.differences(whole, other)
    assert names[0] == "other records" and "model.tok_embeddings.weight@0,0" in names and "optim.step@" not in names
