"""One rank of a machine works for all: the others wait, and then do the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
from compiler_trainer.step.ranks import first_of_each_machine_first, rank, start_ranks

def say(what):
    with open(sys.argv[1], "a") as file:
        file.write(f"{what} {rank()}\\n")

def make():
    say("begins")
    time.sleep(1.0 - rank())
    if sys.argv[2] == "fails" and rank() == 0:
        raise ValueError
    say("ends")
    return rank()

start_ranks()
try:
    assert first_of_each_machine_first(make) == rank()
except ValueError:
    time.sleep(5)  # otherwise the other process would be killed
"""


@pytest.mark.parametrize(("how", "expected"), [
    ("goes well", ["begins 0", "ends 0", "begins 1", "ends 1"]),
    ("fails", ["begins 0", "begins 1", "ends 1"]),
])
@pytest.mark.full
def test_other_ranks_wait_for_the_first_and_do_not_hang_when_it_fails(tmp_path, how, expected):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "log"), how], env=env, timeout=200, capture_output=True)
    assert (tmp_path / "log").read_text().splitlines() == expected
