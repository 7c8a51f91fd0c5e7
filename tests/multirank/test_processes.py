"""Real processes over gloo: the numbers of lockstep, one artifact, and no hang if a rank fails."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import (
    NO_DECAY,
    assert_same,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    perceptron,
    points,
    squared_error,
    train_plainly,
    train_step,
)

WORKER, DEADLINE_S = Path(__file__).with_name("worker.py"), 400
ROOT = WORKER.parents[2]


def launch(ranks: int, folder: Path, *checks: str, deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    """Run checks in a torchrun job; return its exit code and stderr; raise TimeoutExpired after the deadline."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([*command, str(WORKER), str(folder), *checks], env=env, stderr=subprocess.PIPE, text=True,
                           start_new_session=True)
    try:
        _, stderr = job.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # torchrun and its ranks
        raise
    return job.returncode, stderr


def outcome(ranks: int, folder: Path, *checks: str, deadline_s: float = DEADLINE_S) -> dict[str, list]:
    """Run checks in a job; return each rank's results by check."""
    code, stderr = launch(ranks, folder, *checks, deadline_s=deadline_s)
    assert code == 0, stderr[-4000:]
    return {check: [torch.load(folder / f"{check}.{rank}.pt") for rank in range(ranks)] for check in checks}


JOBS = {  # name -> ranks, and the checks of that job
    "two": (2, ("inductor2", "stages2", "disagree", "drawn_apart", "flipped")),
    "four": (4, ("hybrid4", "context4", "stages4", "recorded4")),
    "two more": (2, ("shard2", "recorded2", "rings2", "turns2", "replicate2", "memory2")),
    "four more": (4, ("shard4", "ring4", "rings4", "disagree", "drawn_apart")),
}
full = partial(pytest.param, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return a function that runs a named job on its first call and returns each rank's results."""

    @functools.cache
    def job(name: str) -> dict[str, list]:
        ranks, checks = JOBS[name]
        return outcome(ranks, tmp_path_factory.mktemp("job"), *checks)

    return job


@functools.cache
def lockstep(mesh: tuple[tuple[str, int], ...]) -> SimpleNamespace:
    """Run the same training with all ranks in this process."""
    data = batches(rows=6)
    step = compile_lockstep(llama(dtype=torch.float32), llama_loss, data[0], dict(mesh), NO_DECAY, evaluate=True)
    metrics = train_step(step, data)
    return SimpleNamespace(metrics=metrics, evaluation=step.evaluate(data[0]), state=step.state_dict())


def assert_equal(result: dict, wanted: SimpleNamespace, tolerance: float) -> None:
    """Compare metrics, evaluation and parameters with the lockstep run."""
    for ours, theirs in zip(result["metrics"], wanted.metrics, strict=True):
        assert_same(ours, theirs, tolerance)
    assert result["evaluation"] == pytest.approx(wanted.evaluation, rel=tolerance, abs=tolerance)
    assert_same(result["state"], wanted.state, tolerance)


@pytest.mark.full
@pytest.mark.parametrize(("job", "check", "mesh"), [
    ("two more", "shard2", (("dp_shard", 2),)),
    ("two more", "replicate2", (("dp_replicate", 2),)),
])
def test_two_processes_are_lockstep_bit_for_bit(jobs, job, check, mesh):
    for result in jobs(job)[check]:
        assert_equal(result, lockstep(mesh), 0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("job", "check", "mesh", "groups"), [
    full("four more", "shard4", (("dp_shard", 4),), {"dp_shard", "dp_shard:gradients"}),
    ("four", "hybrid4", (("dp_replicate", 2), ("dp_shard", 2)), {"dp_replicate", "dp_shard", "dp_shard:gradients"}),
    full("four more", "ring4", (("cp", 4),), {"cp", "fsdp", "fsdp:gradients"}),
    ("four", "context4", (("dp_shard", 2), ("cp", 2)), {"cp", "fsdp", "fsdp:gradients"}),
])
@pytest.mark.full
def test_four_processes_are_lockstep_but_for_the_order_of_sums(jobs, job, check, mesh, groups):
    """An axis has a second group if its gradients are sent while other collectives run."""
    ranks = jobs(job)[check]
    for result in ranks:
        assert_equal(result, lockstep(mesh), 1e-6)
        assert set(result["groups"]) == groups and result["differences"] == []
    assert all(result["metrics"] == ranks[0]["metrics"] for result in ranks)
    assert len({tuple(result["groups"]) for result in ranks}) == 1  # created in the same order


@pytest.mark.full
@pytest.mark.parametrize(("job", "check", "tp"), [("two more", "rings2", 2), full("four more", "rings4", 4)])
def test_products_beside_rings_are_lockstep_without_them(jobs, job, check, tp):
    for result in jobs(job)[check]:
        assert_equal(result, lockstep((("tp", tp),)), 1e-5)
        assert result["differences"] == []


@pytest.mark.full
def test_microbatches_side_by_side_are_lockstep_of_the_whole_batch(jobs):
    for result in jobs("two more")["turns2"]:
        assert_equal(result, lockstep((("tp", 2),)), 1e-5)
        assert result["differences"] == []


def of_stages(mesh: dict[str, int], schedule: str, layers: int, **model: object) -> SimpleNamespace:
    """Run a step of pipeline stages with all ranks in this process."""
    data, passes = batches(rows=6), {"pipeline": {"schedule": schedule}}
    model = llama(layers, dtype=torch.float32, **model)
    options = {"microbatches": 3, "passes": passes, "evaluate": True}
    step = compile_lockstep(model, llama_loss, data[0], mesh, NO_DECAY, **options)
    metrics = train_step(step, data)
    return SimpleNamespace(metrics=metrics, evaluation=step.evaluate(data[0]), state=step.state_dict())


def test_pipeline_stages_are_lockstep_bit_for_bit(jobs):
    for result in jobs("two")["stages2"]:
        assert_equal(result, of_stages({"pp": 2}, "zbv", 4, tied=True), 0)
        assert result["differences"] == []


@pytest.mark.full
def test_sharded_pipeline_stages_are_lockstep(jobs):
    for result in jobs("four")["stages4"]:
        assert_equal(result, of_stages({"pp": 2, "dp_shard": 2}, "zero_bubble", 2), 1e-5)
        assert result["differences"] == []


@pytest.mark.full
@pytest.mark.parametrize(("job", "check"), [("two more", "recorded2"), ("four", "recorded4")])
def test_recorded_stages_of_processes_have_the_bits_of_others(jobs, job, check):
    for (wanted, no_recordings), (result, recordings) in jobs(job)[check]:
        assert result == wanted and recordings > no_recordings == 0


@pytest.mark.full
def test_memory_of_pipeline_ranks_is_as_a_dry_run_predicts(jobs, record_property):
    """Exact to the byte, except for scalars that no program holds; independent of the number of microbatches."""
    numbers = 8 * 16  # bytes
    for rank, result in enumerate(jobs("two more")["memory2"]):
        for case, peak in result.items():
            assert 0 <= peak["measured"] - peak["predicted"] <= numbers, case
            assert peak["kinds"]["buffers of receives"] > 0 and peak["kinds"]["tensors being sent"] > 0
        few, many = (result["1f1b", microbatches]["measured"] for microbatches in (4, 16))
        assert abs(many - few) <= numbers
        record_property("counted", f"pipeline rank {rank}: {few:,} bytes with 4 microbatches, {many:,} with 16")


def test_a_flipped_bit_of_a_replica_is_found_and_gone_once_the_other_is_sent(jobs):
    for name, result, after in jobs("two")["flipped"]:
        assert result == [(name, (), (0, 1))] and after == 0


def test_two_processes_with_inductor_are_one_device(jobs):
    model, data = perceptron(dtype=torch.float32), points(dtype=torch.float32)
    wanted, _ = train_plainly(model, squared_error, data, NO_DECAY)
    for result in jobs("two")["inductor2"]:
        losses = [m["loss"] for m in result["metrics"]]
        assert losses == pytest.approx([m["loss"] for m in wanted], abs=1e-5)


def test_ranks_share_out_the_bodies_and_take_each_others(jobs):
    first, second = (result["bodies"] for result in jobs("two")["inductor2"])
    assert min(first["compiled"], second["compiled"]) > 0
    assert first["compiled"] == second["loaded"] and second["compiled"] == first["loaded"]  # no body is compiled twice


@pytest.mark.sweep(2)
@pytest.mark.full
@pytest.mark.parametrize("name", ["dp", "tp", "cp", "float8", "remat", "microbatches", "turns"])
def test_segments_under_inductor_train_as_the_whole(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "1")  # otherwise different fusions round differently
    for segments, whole in outcome(2, tmp_path, f"cut_{name}", deadline_s=550)[f"cut_{name}"]:
        for ours, theirs in zip(segments, whole, strict=True):
            assert_same(ours, theirs, 1e-6)


@pytest.mark.parametrize("job", ["two", full("four more")])
def test_ranks_that_disagree_all_say_where(job, jobs):
    ranks = JOBS[job][0]
    for message in jobs(job)["disagree"]:
        assert "step: ranks disagree on the program" in message
        assert f"+++ rank {ranks - 1}" in message
        assert any(line.startswith("-") and "0.5" in line for line in message.splitlines())
        assert any(line.startswith("+") and "0.25" in line for line in message.splitlines())


@pytest.mark.parametrize("job", ["two", full("four more")])
def test_initial_values_that_differ_between_ranks_are_refused_on_all(job, jobs):
    fix = "build the model from the same seed on all ranks, as after torch.manual_seed(0)"
    for message, name in jobs(job)["drawn_apart"]:
        assert message == f"{name}: has another initial value on rank {JOBS[job][0] - 1} than on rank 0; {fix}"


@pytest.mark.full
def test_a_job_ends_when_one_rank_raises(tmp_path):
    code, stderr = launch(2, tmp_path, "raise")
    assert code != 0
    assert "ValueError: rank 1 gives up" in stderr
