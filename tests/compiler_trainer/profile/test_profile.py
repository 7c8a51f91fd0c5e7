"""The report of a profile on planted causes, and its predictions for changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from short_runs import options

from compiler_trainer.config.device import for_running
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.planning.space import replace_nested
from compiler_trainer.profile import changes, report
from compiler_trainer.profile.causes import OfRank, causes
from compiler_trainer.profile.predicted import Predicted, predicted
from compiler_trainer.training.trace import Spent

ROOT = Path(__file__).resolve().parents[3]
EXPECTED = Spent(100.0, {"products": 60.0, "loops": 30.0}, {"fsdp": 10.0})


def ranks(**otherwise: Spent) -> list[OfRank]:
    """Return three ranks that work as expected, except for the given ones."""
    usual = Spent(100.0, {"products": 60.0, "loops": 28.0}, {"fsdp": 10.0}, 1.0, 1.0)
    return [OfRank(n, f"node{n}", otherwise.get(f"rank{n}", usual)) for n in range(3)]


@pytest.fixture
def cfg(tmp_path):
    return for_running(options(tmp_path, mesh=MeshConfig(dp_shard=2)))


def test_nothing_is_said_of_ranks_that_work_as_expected(cfg):
    assert causes(cfg, ranks(), EXPECTED) == []


def test_a_slow_loader_is_named_and_is_no_straggler(cfg):
    slow = Spent(200.0, {"products": 60.0, "loops": 28.0}, {"fsdp": 10.0}, 1.0, 101.0)
    (found,) = causes(cfg, ranks(rank2=slow), EXPECTED)
    assert found.what == "rank 2 waits 101.0 ms for data, 50% of a step" and found.saves_ms == 101.0


def test_a_straggler_is_named_with_its_host_and_what_takes_it_longer(cfg):
    slow = Spent(150.0, {"products": 62.0, "loops": 76.0}, {"fsdp": 1.0}, 10.0, 1.0)
    waits = Spent(150.0, {"products": 60.0, "loops": 28.0}, {"fsdp": 60.0}, 1.0, 1.0)
    (found,) = causes(cfg, ranks(rank0=waits, rank1=slow, rank2=waits), EXPECTED)
    assert found.what == (
        "rank 1 (node1) works 149.0 ms, the median rank 90.0; 76.0 ms of it loops, where the other has 28.0"
    )
    assert found.saves_ms == pytest.approx(59.0)


def test_a_stage_with_more_layers_is_no_straggler(cfg):
    cfg = replace_nested(cfg, {"mesh": {"dp_shard": 1, "pp": 4}})
    works = [Spent(100.0, {"products": ms}, {"pp": 100.0 - ms}) for ms in (60.0, 60.0, 60.0, 80.0)]
    (found,) = causes(cfg, [OfRank(n, "node", spent) for n, spent in enumerate(works)], EXPECTED)
    assert found.what == "pipeline rank 3 works 80.0 ms, the median one 60.0" and "passes.pipeline.stages" in found.fix
    pairs = [OfRank(n, "node", works[n // 2]) for n in range(8)]
    pairs[3] = replace(pairs[3], spent=replace(works[1], step_ms=130.0, host_ms=30.0))
    assert any(cause.what.startswith("rank 3 (node) works 90.0 ms") for cause in causes(cfg, pairs, EXPECTED))


def test_a_machine_unlike_its_cluster_is_said(cfg):
    hot = Spent(300.0, {"products": 190.0, "loops": 90.0}, {"fsdp": 10.0}, 1.0, 1.0)
    (found,) = causes(cfg, ranks(rank0=hot, rank1=hot, rank2=hot), EXPECTED)
    assert found.what == "computing takes 3.1 times the prediction for cpu"


@pytest.mark.parametrize(("wait", "travels", "saves"), [
    ((40.0, 10.0), (80.0, 20.0), 75.0 + 45.0),  # a predicted wait: the measured wait shrinks in proportion
    ((0.0, 0.0), (80.0, 20.0), 75.0 + 45.0),  # no predicted wait: it shrinks with the collective's time
    ((40.0, 80.0), (80.0, 80.0), -100.0 + 45.0),
])
def test_what_is_saved_is_the_predicted_share_of_what_was_measured(wait, travels, saves):
    measured = Spent(200.0, {"products": 90.0}, {"fsdp": 100.0}, 10.0)
    now, then = (Predicted(Spent(0.0, {"products": c}, {"fsdp": w}), {"fsdp": t}, {}) for c, w, t in zip((60.0, 30.0), wait, travels))
    assert changes.saved_ms(measured, now, then) == pytest.approx(saves)


def test_a_new_axis_waits_as_much_longer_than_predicted_as_the_others():
    measured = Spent(200.0, {}, {"fsdp": 100.0})
    now, then = (Predicted(Spent(0.0, {}, waits), waits, {}) for waits in ({"fsdp": 20.0}, {"tp": 8.0}))
    assert changes.saved_ms(measured, now, then) == pytest.approx(100.0 - 5 * 8.0)


def test_larger_buckets_are_predicted_to_save_what_small_ones_cost(cfg):
    small = replace_nested(cfg, {"passes": {"communication": {"bucket_mib": 0.0}}})
    now = predicted(small)
    proposed = [other for other in changes.others(small) if other.passes.communication.bucket_mib == 25.0]
    (change,) = (changes.changed(small, other, now.spent, now, 0) for other in proposed)
    assert change.options == "passes.communication.bucket_mib=25.0" and change.fits
    assert change.saves_ms > 0.05 * now.spent.step_ms
    parts = [*now.spent.kinds.values(), *now.spent.exposed_ms.values(), now.spent.host_ms]
    assert now.spent.step_ms == pytest.approx(sum(parts), rel=1e-3)  # events are rounded
    assert sum(now.spent.places.values()) == pytest.approx(sum(now.spent.kinds.values()))


def test_a_change_that_a_pass_refuses_is_kept_with_its_reason(cfg):
    now = Predicted(EXPECTED, {}, {})
    found = changes.changed(cfg, replace_nested(cfg, {"passes": {"remat": {"layers": {"nothing.*": "full"}}}}), EXPECTED, now, 0)
    assert "nothing.*" in found.refused and not found.fits


def test_a_run_that_measured_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no measured.json: train the run again with run.profile=true"):
        report.read_measurements(tmp_path)


RANK = {"rank": 0, "host": "a", "step_ms": 2.0, "kinds": {}, "exposed_ms": {"tp": 1.0}, "host_ms": 0.0, "data_ms": 0.0, "places": {}}
DAMAGED = ("", "{", "[1]", '{"ranks": []}', '{"ranks": [{"rank": 0}]}', json.dumps({"ranks": [RANK | {"step_ms": "2"}]}))


@pytest.mark.parametrize("text", DAMAGED)
def test_what_was_measured_and_is_damaged_is_refused_in_a_line(text, tmp_path):
    (tmp_path / "measured.json").write_text(json.dumps({"ranks": [RANK]}))
    assert report.read_measurements(tmp_path)[0].busy_ms == 1.0
    (tmp_path / "measured.json").write_text(text)
    with pytest.raises(UserError, match=r"measured\.json: is damaged: train the run again with run.profile=true"):
        report.read_measurements(tmp_path)


PLANTED = """
import time
import torch
import compiler_trainer as ct


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        time.sleep(0.3)
        return {"tokens": (torch.arange(16) + number) % 250}


class Straggles(ct.Callback):
    def on_start(self, run):
        taken = run.step.run

        def slowly(*how):
            time.sleep(0.4 * (run.rank == 1))
            return taken(*how)

        run.step.run = slowly
"""
JOB = ("model.n_layers=2", "model.dim=16", "model.n_heads=2", "model.n_kv_heads=1", "train.seq_len=16", "lower.backend=eager")


def profiled(folder: Path, ranks: int, *overrides: str) -> tuple[dict, str]:
    """Return the output of `profile` for a job."""
    (folder / "planted.py").write_text(PLANTED)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", str(ranks), "profile", f"run.dir={folder / 'run'}", *JOB, *overrides]
    done = subprocess.run(command, env=env, check=False, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run" / report.FILE).read_text()), done.stdout


@pytest.mark.full
def test_a_slow_loader_small_buckets_and_a_straggler_are_named(tmp_path):
    small = ("mesh.dp_shard=2", "passes.communication.bucket_mib=0.001")
    found, said = profiled(tmp_path, 2, *small, "train.callbacks=[{_target_:planted.Straggles}]")
    assert found["causes"][0]["what"].startswith("rank 1 (") and "ms of it host" in found["causes"][0]["what"]
    assert "passes.communication.bucket_mib=25.0" in said
    (tmp_path / "loader").mkdir()
    _, said = profiled(tmp_path / "loader", 2, "mesh.dp_shard=2", "data=custom", "data._target_=planted.Slow", "model.vocab_size=257")
    assert " ms for data, " in said


@pytest.mark.full
def test_fsdp_beside_tensor_parallelism_has_waits_for_both_axes(tmp_path):
    found, said = profiled(tmp_path, 4, "mesh.dp_shard=2", "mesh.tp=2")
    for spent in (*found["ranks"], found["predicted"]):
        assert {"dp_shard", "tp"} <= spent["exposed_ms"].keys()
    for spent in found["ranks"]:
        parts = [*spent["kinds"].values(), *spent["exposed_ms"].values(), spent["host_ms"], spent["data_ms"]]
        assert sum(parts) == pytest.approx(spent["step_ms"], rel=1e-3)
    assert "waiting for dp_shard" in said and "waiting for tp" in said
