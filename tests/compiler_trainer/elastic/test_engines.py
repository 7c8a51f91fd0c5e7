"""A process that an engine started knows its rank, and a mixture of engines or a missing launcher is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from compiler_trainer.cli.verbs import launch
from compiler_trainer.config.errors import UserError
from compiler_trainer.elastic.engines import first_host, place_in_engine, place_of_rank

SLURM = {
    "SLURM_JOB_ID": "40", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x2),2", "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    "SLURM_NTASKS": "6",
}
KUBEFLOW = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0.svc", "PET_MASTER_PORT": "29400"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


def test_a_task_of_srun_is_a_rank():
    place = place_of_rank(SLURM)
    assert place.as_rank() == {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07", "MASTER_PORT": "15040",
    }
    assert str(place) == "SLURM started 6 processes; the first one is at gpu07:15040"
    assert place_of_rank({**SLURM, "SLURM_STEP_ID": "1"}).port != place.port  # steps may run at the same time


@pytest.mark.parametrize(("text", "host"), [
    ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[07-12,20]", "gpu07"), ("gpu[3,7]-ib", "gpu3-ib"), ("r[1-2]n[05-06],a", "r1n05"),
])
def test_the_first_host_of_a_list(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("env", [{**KUBEFLOW, "PET_NPROC_PER_NODE": "1"}, {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}], ids=["Kubeflow", "SkyPilot"])
def test_a_process_for_a_whole_machine_is_a_rank_where_there_is_one(env):
    place = place_of_rank(env)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 0, 1)


@pytest.mark.parametrize("env", [
    {}, TORCHRUN, {**SLURM, **TORCHRUN}, {**KUBEFLOW, **TORCHRUN}, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    {**KUBEFLOW, "PET_NNODES": "1"}, {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.4"},
], ids=["nothing", "torchrun", "torchrun in srun", "torchrun in a pod", "one task", "a batch script", "one pod", "one machine"])
def test_a_process_alone_or_of_torchrun_has_no_other_place(env):
    assert place_in_engine(env) is None


@pytest.mark.parametrize(("env", "message"), [
    ({**SLURM, **SKYPILOT}, "^environment: SLURM and SkyPilot both give this process a place; unset the variables of one"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "^RANK: is 1, but LOCAL_RANK is not set, as where RANK counts machines; unset RANK and WORLD_SIZE"),
    (KUBEFLOW, "^Kubeflow Trainer: started one process for 8 ranks on each of 2 machines; write `compiler-trainer launch` before"),
    (SKYPILOT, "^SkyPilot: started one process for 8 ranks on each of 2 machines"),
    ({"PET_NNODES": "2"}, "^PET_NODE_RANK: is not set, but PET_NNODES=2"),
])
def test_what_is_no_rank_is_refused(env, message):
    with pytest.raises(UserError, match=message):
        place_of_rank(env)


ON_NODE_0 = {"SLURM_STEP_TASKS_PER_NODE": "1(x6)", "SLURM_NODEID": "5", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(("env", "flags", "expected"), [
    (KUBEFLOW, [], (8, 1, 2, "job-0.svc", 29400)),
    (SKYPILOT, ["-n", "4"], (4, 1, 2, "10.0.0.4", 29500)),
    ({**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}, [], (1, 1, 2, "job-0.svc", 29400)),
    ({**SLURM, **ON_NODE_0}, ["-n", "3"], (3, 5, 6, "gpu07", 15040)),
    (KUBEFLOW, ["--nnodes=3", "--node-rank=2", "--master-addr=a", "-n", "2"], (2, 2, 3, "a", 29500)),  # flags win
    ({}, ["--nnodes=3", "--node-rank=0", "--master-addr=a", "--master-port=5"], (1, 0, 3, "a", 5)),
    ({}, ["-n", "2"], (2, 0, 1, "127.0.0.1", 0)),
])
def test_launch_starts_the_ranks_of_a_machine_in_the_engines_job(env, flags, expected, monkeypatch):
    started = []

    class Launcher:
        def __init__(self, count, command, spares, elastic, place):
            started.extend([(count, place.rank, place.size, place.address, place.port), command[1:], elastic])

        def run(self):
            return 0

    monkeypatch.setattr(launch.os, "environ", dict(env))
    monkeypatch.setattr(launch, "Launcher", Launcher)
    assert launch.main([*flags, "optim.lr=1"]) == 0
    assert started == [expected, ["-m", "compiler_trainer", "optim.lr=1"], False]


@pytest.mark.parametrize(("flags", "problem"), [
    (["--nnodes=2", "--master-addr=a"], "^--nnodes: is 2; give --node-rank, too"),
    (["--nnodes=2", "--node-rank=0"], "^--nnodes: is 2; give --master-addr, too"),
    (["--nnodes=2", "--node-rank=2", "--master-addr=a"], "^--node-rank: is 2; give a number from 0 to 1"),
    (["--master-port=5"], "^--master-port: is for several machines; give --nnodes, too, or none"),
    (["--node-rank=0"], "^--node-rank: is for several machines"),
    (["-n", "many"], "^-n: is many; give the number of ranks on this machine"),
])
def test_a_part_of_a_place_is_refused(flags, problem, monkeypatch):
    monkeypatch.setattr(launch.os, "environ", {})
    with pytest.raises(UserError, match=problem):
        launch.main([*flags, "optim.lr=1"])


def test_launch_inside_tasks_of_srun_is_refused(monkeypatch):
    monkeypatch.setattr(launch.os, "environ", dict(SLURM))
    with pytest.raises(UserError, match="^SLURM: started 2 ranks on this machine; leave out `launch`"):
        launch.main(["optim.lr=1"])


@pytest.mark.full
def test_tasks_of_srun_train_one_run(tmp_path):
    """Without torchrun, each of the two would otherwise train the whole job alone."""
    job = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "train.seq_len=16", "train.global_batch_size=4", "train.steps=2",
           "lower.backend=eager", "mesh.dp_shard=2", "run.dir=run", "checkpoint.interval=null"]
    env = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    env |= {**SLURM, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        subprocess.Popen([sys.executable, "-m", "compiler_trainer", *job], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=env | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
        for n in range(2)
    ]
    (first, engine), (second, _) = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], engine
    assert engine.startswith("SLURM started 2 processes; the first one is at localhost:")
    assert "step 2/2" in first and not second
