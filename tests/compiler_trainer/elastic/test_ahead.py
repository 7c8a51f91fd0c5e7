"""While an elastic job trains, the programs and kernels for one rank fewer are compiled, and used if a rank is lost."""

from __future__ import annotations

import json
import pickle
import sys
import time

import psutil
import pytest
from commands import call

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.elastic import ahead
from compiler_trainer.runs import idle
from passes.lower import inductor

SMALL = (
    "model.dim=16 model.n_layers=2 model.n_heads=2 model.n_kv_heads=1 model.ffn_dim=24 train.seq_len=16 train.steps=2 "
    "data=synthetic data.documents=400 checkpoint.interval=null eval.interval=null"
).split()
KEEPING = """
import os, pickle, sys, time
sizes = [cfg.mesh.dp_shard * cfg.mesh.dp_replicate for cfg in pickle.load(sys.stdin.buffer)]
print("RANK" in os.environ, *sizes, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""


def config(*options):
    return to_config(compose([*SMALL, "run.elastic=true", *options]))


@pytest.mark.parametrize(("mesh", "on_machine", "sizes"), [
    ("mesh.dp_shard=3", 3, ["2"]),
    ("mesh.dp_shard=1 mesh.dp_replicate=3", 1, ["2"]),
    ("mesh.dp_shard=4", 2, ["3", "2"]),  # one rank fewer, and one machine
])
def test_a_process_gets_the_job_on_fewer_ranks_and_ends_with_the_round(mesh, on_machine, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "COMMAND", [sys.executable, "-c", KEEPING, str(tmp_path / "seen")])
    monkeypatch.setenv("RANK", "0")
    with ahead.compiling_ahead(config(*mesh.split()), on_machine):
        end = time.monotonic() + 30
        while not (tmp_path / "seen").exists() or not (tmp_path / "seen").read_text():
            assert time.monotonic() < end
            time.sleep(0.01)
    assert (tmp_path / "seen").read_text().split() == ["False", *sizes]
    assert not [child for child in psutil.Process().children() if str(tmp_path / "seen") in child.cmdline()]


@pytest.mark.parametrize("options", ["mesh.dp_shard=1", "mesh.dp_shard=1 mesh.tp=2", "mesh.dp_shard=2 run.compile_ahead=false"])
def test_nothing_is_compiled_where_no_mesh_is_smaller_or_it_is_not_wanted(options, monkeypatch):
    monkeypatch.setattr(ahead, "COMMAND", ["/does/not/exist"])
    with ahead.compiling_ahead(config(*options.split()), 1):
        pass


def test_a_process_that_cannot_start_says_so_itself_and_the_job_goes_on(monkeypatch):
    monkeypatch.setattr(ahead, "COMMAND", [sys.executable, "-c", "import sys; sys.stdin.close(); sys.exit(1)"])
    with ahead.compiling_ahead(config("mesh.dp_shard=2"), 2):
        pass


@pytest.mark.full
def test_a_job_on_the_smaller_mesh_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COMPILER_TRAINER_SNAPSHOTS", str(tmp_path))
    cfg = config("mesh.dp_shard=1")
    idle.compile_all(pickle.loads(pickle.dumps(cfg)))
    monkeypatch.setattr(inductor, "compile_body", lambda body, *_: pytest.fail(f"{body.name} is compiled"))
    assert call(*SMALL, "mesh.dp_shard=1", f"run.dir={tmp_path / 'run'}") == 0
    assert json.loads((tmp_path / "run/report.json").read_text())["program"]["read"]


def test_a_dry_run_of_an_elastic_job_needs_no_launcher(tmp_path, capsys):
    job = ["mesh.dp_shard=2", "cluster=h100", "run.elastic=true", "run.dry=true", f"run.dir={tmp_path / 'dry'}"]
    assert call(*SMALL, *job) == 0
    assert "tokens/s/GPU" in capsys.readouterr().out


def test_it_begins_after_the_first_snapshot(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILER_TRAINER_SNAPSHOTS", str(tmp_path))
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        (tmp_path / "step_00000010").mkdir()

    monkeypatch.setattr(idle.time, "sleep", sleep)
    idle.wait_for_snapshot(config("mesh.dp_shard=2"))
    assert len(naps) == 1
