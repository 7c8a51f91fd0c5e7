"""A rank that hangs is detected and named, and ends the job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiler_trainer.training.failures import Beat, Watch, operation_of, report

HANGS = """
import time
from pathlib import Path
from compiler_trainer.training.failures import Watch

with Watch(0.5, Path("watched")) as watch:
    watch.step = 7
    time.sleep(60)
"""
MOVES = """
import time
from pathlib import Path
from compiler_trainer.training.failures import Watch

with Watch(0.5, Path("watched")) as watch:
    for watch.step in range(15):
        time.sleep(0.1)
print("done")
"""
COPIES = """
import time
from pathlib import Path
from threading import Thread
from compiler_trainer.places.store import TRAFFIC
from compiler_trainer.training.failures import Watch

def copy():
    for _ in range(15):
        time.sleep(0.1)
        TRAFFIC.relative_update(5)

with Watch(0.5, Path("watched")):
    thread = Thread(target=copy)
    thread.start()
    thread.join()
print("done")
"""


WAITS = """
import time
from pathlib import Path
from compiler_trainer.step.step import Step
from compiler_trainer.step.turns import Turn
from compiler_trainer.training.failures import Watch

step = object.__new__(Step)
step.microbatches, step.microbatches_per_turn = 4, 1
step.split = lambda batch: [{}] * 4
step.entries = {}
step.counts = lambda batch: {}
step.scalars = lambda *how: {}
step.run = lambda *how: time.sleep(60)
carried = type("Carried", (), {"begin": lambda self: None, "start": lambda self, turn: None})()
program = type("Compiled", (), {"compile": lambda self: None})()
with Watch(0.5, Path("watched")) as watch:
    step.take(([Turn("F1", 2)], carried), {"F1": program}, {}, 0.0, 0)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_a_process_that_waits_for_ever_is_ended_and_says_where_it_was():
    ended = run(HANGS)
    assert ended.returncode == 1 and "no progress for 0.5 s (run.timeout_s): rank 0 is in" in ended.stderr
    assert "after step 7" in ended.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("code", [MOVES, COPIES], ids=["steps", "copies"])
def test_one_that_moves_on_is_left_alone(code):
    assert run(code).stdout == "done\n"


@pytest.mark.parametrize(
    ("beats", "message"),
    [
        ([(0, Beat(9, 4, "all_gather_3 (x)", True), True), (1, Beat(5, 3, "mm_1 (y)", False), False)], "rank 1 does not answer, it was last in mm_1 (y) after step 3"),
        ([(0, Beat(9, 4, "all_gather_3 (x)", True), True), (1, Beat(9, 4, "mm_1 (y)", False), True)], "rank 1 is in mm_1 (y) after step 4"),
        ([(0, Beat(9, 4, "a (x)", True), True), (1, Beat(9, 4, "b (y)", True), True)], "rank 0 waits in a (x) after step 4; rank 1 waits in b (y) after step 4"),
    ],
)
def test_who_hangs_is_the_silent_rank_else_the_one_that_waits_for_nobody(beats, message, capsys):
    report(2.0, beats)
    assert capsys.readouterr().err == f"error: no progress for 2 s (run.timeout_s): {message}\n"


def test_a_line_of_generated_code_is_told_by_its_nodes(tmp_path):
    file = tmp_path / "generated.py"
    file.write_text("import sys\n# Topologically Sorted Source Nodes: [all_gather_3], Original ATen: []\nframe = sys._getframe()\n")
    space: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    assert operation_of(space["frame"]).startswith("all_gather_3 (")


@pytest.mark.full
def test_a_stopped_rank_of_two_is_named(tmp_path):
    options = "data=synthetic data.documents=200 train.steps=100000 train.seq_len=16 train.global_batch_size=4 eval.interval=null".split()
    small = "model.dim=16 model.n_layers=2 model.n_heads=2 model.n_kv_heads=1 model.ffn_dim=24 run.dump_graphs=false".split()
    how = [f"run.dir={tmp_path}/run", "run.timeout_s=3", "lower.backend=eager", "checkpoint.interval=null", "mesh.pp=2", "train.microbatches=2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "compiler_trainer"]
    metrics = Path(tmp_path, "run/metrics.jsonl")
    with subprocess.Popen([*command, *options, *small, *how], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True) as job:
        stopped = []
        try:
            while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
                assert job.poll() is None, job.stderr.read()
                time.sleep(0.2)
            stopped = [second_rank(job.pid)]
            os.kill(stopped[0], signal.SIGSTOP)
            output = next(line for line in job.stderr if "no progress for" in line)
        finally:
            for process in stopped:  # each in its own session
                os.kill(process, signal.SIGKILL)
            os.killpg(job.pid, signal.SIGKILL)
    assert re.search(r"rank 1 does not answer, it was last in ([FBGRU]1( of microbatch [01])?, )?.* after step", output)
    assert json.loads(metrics.read_text().splitlines()[0])["step"] == 1


def test_a_rank_that_waits_in_a_task_names_it_and_its_microbatch():
    ended = run(WAITS)
    assert "rank 0 is in F1 of microbatch 2, <string>:" in ended.stderr


def second_rank(launcher: int) -> int:
    """Return the process of rank 1 below a launcher."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and b"RANK=1" in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("rank 1 is not there")


def test_what_the_flight_recorder_holds_is_kept_and_named(tmp_path, monkeypatch, capsys):
    watch = Watch(2.0, tmp_path)
    assert watch.write_flight_record() == ""  # there is no NCCL
    monkeypatch.setattr("compiler_trainer.training.failures.collectives_recorded", lambda: b"recorded")
    report(2.0, [(0, Beat(9, 4, "a (x)", True), True)], watch.write_flight_record())
    folder = tmp_path / "flight_recorder"
    assert (folder / "rank_0").read_bytes() == b"recorded"
    assert capsys.readouterr().err.endswith(f"collectives of each rank are in {folder}: torchfrtrace {folder} -p rank_\n")
