"""`launch` splits its arguments between launcher and ranks, and ends with a failed rank's exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import call

from compiler_trainer.cli.verbs.launch import split


@pytest.mark.parametrize(("arguments", "flags", "job"), [
    (["-n", "2", "job.yaml", "-m"], ["-n", "2"], ["job.yaml", "-m"]),
    (["-n", "2", "optim.lr=1", "--cfg", "job"], ["-n", "2"], ["optim.lr=1", "--cfg", "job"]),
    (["-n", "2", "--nnodes=2", "resume", "RUN"], ["-n", "2", "--nnodes=2"], ["resume", "RUN"]),
    (["-n", "2", "--config-dir", "DIR", "model=x"], ["-n", "2"], ["--config-dir", "DIR", "model=x"]),
    (["-n", "2", "-cd=DIR", "model=x"], ["-n", "2"], ["-cd=DIR", "model=x"]),
    (["-n", "2", "-m", "optim.lr=1,2"], ["-n", "2"], ["-m", "optim.lr=1,2"]),
    (["-n", "2"], ["-n", "2"], []),
])
def test_flags_are_the_launchers_up_to_the_first_option_flag_of_training_or_verb(arguments, flags, job):
    assert split(arguments) == (flags, job)


def test_a_port_in_use_is_refused_in_one_line(capfd):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        flags = ["--nnodes=2", "--node-rank=0", "--master-addr=localhost", f"--master-port={port}"]
        assert call("launch", "-n", 1, *flags, "train.steps=1") == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert message == f"error: --master-port: {port} is in use on this machine; choose another port"


def test_a_refusal_is_one_line_and_the_exit_code_that_of_the_ranks():
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", "2", "optim.lrr=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: optim.lrr: no such option; did you mean 'lr'?\n"


@pytest.mark.full
def test_a_signal_to_the_launcher_saves_and_its_exit_code_is_that_of_the_ranks(tmp_path):
    job = ["model.dim=16", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "train.seq_len=16", "train.global_batch_size=4",
           "train.steps=100000", "lower.backend=eager", "mesh.dp_shard=2", "run.dir=run", "eval.interval=null", "run.exit_codes.stopped=75"]
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", "2", *job]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    record = tmp_path / "run/metrics.jsonl"
    while not record.exists() or not record.read_text():
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.send_signal(signal.SIGUSR1)
    output = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 75 and "because of SIGUSR1; resume with: compiler-trainer launch -n 2 resume run" in output
