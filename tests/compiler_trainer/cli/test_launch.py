"""`launch` splits its arguments between launcher and ranks, and ends with a failed rank's exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compiler_trainer.cli.verbs.launch import split


@pytest.mark.parametrize(("arguments", "flags", "job"), [
    (["-n", "2", "optim.lr=1", "--cfg", "job"], ["-n", "2"], ["optim.lr=1", "--cfg", "job"]),
    (["-n", "2", "--nnodes=2", "resume", "RUN"], ["-n", "2", "--nnodes=2"], ["resume", "RUN"]),
    (["-n", "2"], ["-n", "2"], []),
])
def test_flags_are_the_launchers_up_to_the_first_option_or_verb(arguments, flags, job):
    assert split(arguments) == (flags, job)


@pytest.mark.full
def test_a_refusal_is_one_line_and_the_exit_code_that_of_the_ranks():
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", "2", "optim.lrr=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: optim.lrr: no such option; did you mean 'lr'?\n"
