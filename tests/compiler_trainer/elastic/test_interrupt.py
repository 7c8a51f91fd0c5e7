"""A main thread that waits in a round that is over is interrupted, but not while it launches a collective."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from compiler_trainer.config.errors import RunError
from compiler_trainer.elastic import interrupt as module
from compiler_trainer.step import ranks
from compiler_trainer.step.results import Moment
from passes.torch_private import abort_groups

ROOT = Path(__file__).parents[3]


def waits(event):
    event.wait()


def calls_an_operator(event):
    def call(self, event):
        event.wait()

    call(torch.ops._c10d_functional.wait_tensor.default, event)


CALLS_A_GROUP = compile("def calls_a_group(event):\n    event.wait()", "/site-packages/torch/distributed/c10d.py", "exec")
names: dict = {}
exec(CALLS_A_GROUP, names)


@pytest.mark.parametrize(("main", "is_aborted"), [
    (waits, True), (calls_an_operator, False), (names["calls_a_group"], False),
])
def test_a_thread_that_waits_is_interrupted_unless_it_launches_a_collective(main, is_aborted, monkeypatch):
    monkeypatch.setattr(module, "STILL_S", 0.2)
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    wakes, has_left, aborts, restarts = threading.Event(), threading.Event(), [], []
    monkeypatch.setattr(module, "cut_off", lambda group: (aborts.append(1), wakes.set()))
    thread = threading.Thread(target=lambda: (main(wakes), has_left.set()))
    thread.start()
    module.interrupt(thread.ident, has_left, lambda: (restarts.append(1), wakes.set()))
    thread.join()
    assert (aborts, restarts) == (([1], []) if is_aborted else ([], [1]))


def test_a_thread_that_leaves_by_itself_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "STILL_S", 0.0)
    monkeypatch.setattr(module, "cut_off", lambda group: pytest.fail("aborted"))
    over = threading.Event()
    over.set()
    module.interrupt(threading.get_ident(), over, lambda: pytest.fail("started again"))


def test_what_was_read_of_aborted_collectives_is_an_error(monkeypatch):
    class Reached:
        def synchronize(self):
            return None

    moment = Moment(torch.device("cpu"))
    moment.event = Reached()
    moment.wait()
    monkeypatch.setattr(ranks, "is_cut_off", threading.Event())
    ranks.is_cut_off.set()
    with pytest.raises(RunError, match="a rank is gone, and the collectives with it were aborted"):
        moment.wait()
    ranks.rejoin()
    moment.wait()


def test_only_the_groups_of_the_round_that_is_over_are_aborted(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(ranks, "abort_groups", dist.destroy_process_group)
    earlier, later = object(), dist.group.WORLD
    ranks.cut_off(earlier)
    assert dist.is_initialized() and not ranks.is_cut_off.is_set()
    ranks.cut_off(later)
    assert not dist.is_initialized() and ranks.is_cut_off.is_set()
    ranks.rejoin()
    assert not ranks.is_cut_off.is_set()


def test_all_groups_are_aborted_at_once(monkeypatch):
    """NCCL's abort of one waits for the kernels of all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: both.wait())
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    abort_groups()
    assert not dist.is_initialized()


RANK = """
import os, signal, sys, time
number = int(os.environ["RANK"])
if number == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if number == 1:
    time.sleep(1)
    os.abort()
"""
JOB = "import sys; from compiler_trainer.elastic.launcher import Launcher; sys.exit(Launcher(2, sys.argv[2:], elastic=sys.argv[1] == 'yes').run())"


@pytest.mark.parametrize(("elastic", "code"), [("yes", 0), ("no", 137)])
def test_a_process_that_crashes_after_another_was_lost_is_replaced(elastic, code):
    """NCCL ends processes whose peer is gone; the new one finishes, as any number above 1 does in this script."""
    command = [sys.executable, "-c", JOB, elastic, sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == code, done.stderr
    if elastic == "yes":
        assert "rank 0 is gone (SIGKILL): 1 are left\n" in done.stderr
        assert "rank 0 is gone (SIGABRT): 0 are left, and another one starts\n" in done.stderr
