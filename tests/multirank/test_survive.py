"""Jobs of `run.elastic=true` go on when ranks are killed, on the mesh that is left, with the losses of a whole run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.elastic.shrink import shrunk
from tests.nightly import survival

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("mesh", "ranks", "smaller"), [
    ({"dp_shard": 4}, 3, {"dp_shard": 3}),
    ({"dp_replicate": 2, "dp_shard": 4}, 7, {"dp_shard": 7}),
    ({"dp_replicate": 2, "dp_shard": 4}, 6, {"dp_replicate": 2, "dp_shard": 3}),
    ({"dp_replicate": 3, "dp_shard": 2}, 4, {"dp_replicate": 2, "dp_shard": 2}),
    ({"dp_shard": 2, "cp": 2}, 3, {"dp_shard": 1, "cp": 2}),
    ({"dp_shard": 2, "tp": 2}, 3, {"dp_shard": 1, "tp": 2}),
    ({"dp_shard": 4, "ep": 2}, 3, {"dp_shard": 2, "ep": 2}),
    ({"dp_shard": 4}, 4, {"dp_shard": 4}),
    ({"dp_shard": 1, "tp": 2}, 1, None),
    ({"dp_shard": 1, "pp": 2}, 1, None),
])
def test_the_mesh_of_fewer_ranks(mesh, ranks, smaller):
    assert shrunk(MeshConfig(**mesh), ranks) == (None if smaller is None else MeshConfig(**{"dp_shard": 1, **smaller}))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_killed_ranks_cost_steps_and_nothing_else(seed, tmp_path):
    tally, whole, folder = survival.Tally(), tmp_path / "whole", tmp_path / "job"
    assert survival.launch(whole, 1, "").wait() == 0
    mesh = ("mesh.dp_shard=3", "mesh.dp_replicate=3 mesh.dp_shard=1", "mesh.dp_shard=1 mesh.cp=3")[seed]
    problem = survival.trial(folder, 3, mesh, random.Random(seed), tally) or survival.difference(whole, folder)
    assert not problem, folder.with_suffix(".log").read_text()
    assert tally.kills


@pytest.mark.parametrize(("options", "problem"), [
    ([], "needs a launcher that outlives ranks; use compiler-trainer launch -n RANKS ..."),
    (["-m", "optim.lr=1,2"], "cannot be set in a sweep, whose points share their ranks; leave it out"),
])
def test_jobs_that_cannot_survive_are_refused(options, problem, tmp_path):
    command = [sys.executable, "-m", "compiler_trainer", "run.elastic=true", f"run.dir={tmp_path}/run", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and not list(tmp_path.glob("run/*.jsonl"))
    assert done.stderr == f"error: run.elastic: {problem}\n"
