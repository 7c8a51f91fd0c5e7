"""Jobs of `run.elastic=true` go on when ranks are killed, on the mesh that is left, with the losses of a whole run."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from commands import call

from compiler_trainer import checkpoint
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.schema import Config, MeshConfig, save
from compiler_trainer.elastic.shrink import shrunk
from compiler_trainer.elastic.survive import train_in_round
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
    assert call("generate", folder, "--prompt", "ab", "--tokens", "2") == call("eval", folder) == 0


@pytest.mark.full
def test_a_running_job_takes_other_meshes(tmp_path, capsys):
    """From the default mesh, all ranks as shards, to 3 ranks, and back to 2."""
    folder, longer = tmp_path / "job", "train.steps=1500 checkpoint.interval=null eval.interval=null"
    whole = survival.launch(tmp_path / "whole", 1, longer)
    job = survival.launch(folder, 2, longer)
    log = folder.with_suffix(".log")
    survival.wait_for(job, folder, 1)
    for size in (3, 2):
        assert call("resize", folder, f"mesh.dp_shard={size}") == 0
        assert capsys.readouterr().out == f"{folder} changes to dp_shard {size} after its next snapshot; it makes one every 5 steps\n"
        until(log, f"on {size} ranks (dp_shard {size})", times=1 if size == 3 else 2)
    assert (job.wait(300), whole.wait(300)) == (0, 0), log.read_text()
    assert not survival.difference(tmp_path / "whole", folder)
    assert call("resize", folder, "mesh.dp_shard=3") == 2
    assert re.search(r"error: RUN: has no launcher at 127\.0\.0\.1:\d+: the job has ended", capsys.readouterr().err)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_is_lost_costs_steps_and_another_one_takes_its_place(number, tmp_path):
    """Both machines are this one; a stopped one is silent, and its connections stay open."""
    folder, port = tmp_path / "job", free_port()
    longer = "train.steps=1500 checkpoint.interval=null eval.interval=null run.compile_ahead=false"

    def machine(node):
        return survival.launch(folder, 2, longer, 3, of_two(node, port))

    first, second, whole = machine(0), machine(1), survival.launch(tmp_path / "whole", 1, longer)
    log = folder.with_suffix(".log")
    survival.wait_for(first, folder, 10)
    second_machine = [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]
    for process in second_machine:
        process.send_signal(number)
    until(log, "on 2 ranks (dp_shard 2)", times=1)
    third = machine(1)
    until(log, "on 4 ranks (dp_shard 4)", times=2)
    if number == signal.SIGSTOP:
        for process in second_machine:
            process.send_signal(signal.SIGCONT)
        assert second.wait(60) == 1
    assert [job.wait(300) for job in (first, third, whole)] == [0, 0, 0], log.read_text()
    assert not survival.difference(tmp_path / "whole", folder)
    text = log.read_text()
    assert "and into the next machine's memory" in text and not re.search("damaged|passed over", text)


@pytest.mark.full
def test_a_job_that_lost_its_first_machine_resumes_from_the_other_ones_memory(tmp_path):
    folder, port = tmp_path / "job", free_port()
    options = "train.steps=1500 checkpoint.interval=1500 eval.interval=1500 run.compile_ahead=false checkpoint.resume=auto"
    machines = [survival.launch(folder, 1, options, 0, of_two(node, port)) for node in (0, 1)]
    whole = survival.launch(tmp_path / "whole", 1, options)
    survival.wait_for(machines[0], folder, 20)
    for process in [*psutil.Process(machines[0].pid).children(recursive=True), psutil.Process(machines[0].pid)]:
        process.kill()
    assert machines[1].wait(120)
    (snapshot,) = checkpoint.complete(folder / "checkpoints")
    assert checkpoint.number_of(snapshot) >= 15
    checkpoint.check(snapshot)
    again = [survival.launch(folder, 1, options, 0, of_two(node, free)) for free in [free_port()] for node in (0, 1)]
    assert [job.wait(300) for job in (*again, whole)] == [0, 0, 0], folder.with_suffix(".log").read_text()
    assert f"resuming after step {checkpoint.number_of(snapshot):,}" in folder.with_suffix(".log").read_text()
    assert not survival.difference(tmp_path / "whole", folder)


def of_two(node, port):
    """Return the flags of a machine of two; both are this one."""
    return ["--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def until(log, text, times):
    end = time.monotonic() + 120
    while log.read_text().count(text) < times:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(("arguments", "problem"), [
    (["train.steps=3"], "train.steps: cannot change while a job runs; give only mesh.AXIS=SIZE"),
    (["mesh.dp_shard=-1"], "mesh.dp_shard: -1 takes the remaining ranks, and nothing says how many there are; set mesh.dp_shard"),
    (["mesh.dp_shard=2"], "{run}: has taken no step yet; ask again when it trains"),
])
def test_what_cannot_be_resized_is_refused(arguments, problem, tmp_path, capsys):
    save(to_config(compose(["run.elastic=true", "mesh.dp_shard=1"])), tmp_path / "config.yaml")
    assert call("resize", tmp_path, *arguments) == 2
    assert capsys.readouterr().err == f"error: {problem.format(run=tmp_path)}\n"


def test_a_damaged_status_is_named(tmp_path, capsys):
    save(to_config(compose(["run.elastic=true", "mesh.dp_shard=1"])), tmp_path / "config.yaml")
    (tmp_path / "status.json").write_text('{"phase": "trai')
    assert call("resize", tmp_path, "mesh.dp_shard=2") == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/status.json: is damaged; the run writes it again with its next step\n"


def test_the_error_that_ends_a_round_keeps_its_place():
    """Its traceback is dropped, because it refers to process groups."""
    member = SimpleNamespace(watching=nullcontext, tell_trouble=lambda: None)
    error = train_in_round(Config(), lambda cfg: {}["missing"], member)
    assert isinstance(error, KeyError) and error.__traceback__ is None
    assert '{}["missing"]' in "".join(traceback.format_exception(error))


def test_a_job_that_is_not_elastic_keeps_its_mesh(tmp_path, capsys):
    save(to_config(compose(["mesh.dp_shard=1"])), tmp_path / "config.yaml")
    assert call("resize", tmp_path, "mesh.dp_shard=2") == 2
    assert capsys.readouterr().err == f"error: run.elastic: is false in {tmp_path}; stop it, and resume it with the other mesh\n"


@pytest.mark.parametrize(("options", "problem"), [
    ([], "needs a launcher that outlives ranks; use compiler-trainer launch -n RANKS ..."),
    (["-m", "optim.lr=1,2"], "cannot be set in a sweep, whose points share their ranks; leave it out"),
])
def test_jobs_that_cannot_survive_are_refused(options, problem, tmp_path):
    command = [sys.executable, "-m", "compiler_trainer", "run.elastic=true", f"run.dir={tmp_path}/run", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and not list(tmp_path.glob("run/*.jsonl"))
    assert done.stderr == f"error: run.elastic: {problem}\n"


@pytest.mark.full
def test_a_rank_that_no_mesh_can_use_is_not_waited_for(tmp_path):
    """One of 4 ranks, pairs of which share weights, is killed: a pair goes on, and the third one is spare."""
    folder = tmp_path / "job"
    whole, job = survival.launch(tmp_path / "whole", 1, ""), survival.launch(folder, 4, "mesh.dp_shard=2 mesh.tp=2")
    survival.wait_for(job, folder, 1)
    survival.ranks_of(job)[1].kill()
    assert (job.wait(120), whole.wait(120)) == (0, 0), folder.with_suffix(".log").read_text()
    assert not survival.difference(tmp_path / "whole", folder)


@pytest.mark.full
@pytest.mark.parametrize(("disturbance", "options", "line"), [
    ("Flip,member:1,step:13", "train.replica_check.action=leave_out", r"rank 1 is left out \(\S+ on rank 1 differs from its copy on ranks 0, 2 after step 15\): 2 are left"),
    ("Delay,member:2,seconds:0.3", "run.pace_interval=4 run.most_slowdown=3", r"rank 2 is left out \(rank 2 works [\d,]+ ms, the median rank [\d,]+ ms\): 2 are left"),
])
def test_a_rank_that_is_wrong_or_slow_is_left_out(disturbance, options, line, tmp_path):
    folder, (name, others) = tmp_path / "job", disturbance.split(",", 1)
    whole = survival.launch(tmp_path / "whole", 1, "")
    callback = f"train.callbacks=[{{_target_:tests.multirank.disturb.{name},{others}}}]"
    job = survival.launch(folder, 3, f"mesh.dp_replicate=3 mesh.dp_shard=1 {callback} {options}")
    assert (job.wait(200), whole.wait(200)) == (0, 0), folder.with_suffix(".log").read_text()
    assert re.search(line, folder.with_suffix(".log").read_text()), folder.with_suffix(".log").read_text()
    assert not survival.difference(tmp_path / "whole", folder)
