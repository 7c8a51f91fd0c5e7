"""A main thread that waits in a round that is over is interrupted, but not while it launches a collective."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
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


@pytest.fixture
def groups(monkeypatch):
    """A default group of gloo that passes for NCCL's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(ranks, "abort_groups", dist.destroy_process_group)
    yield
    ranks.rejoin()


class Kernels:
    """An event on a device whose kernels end when collectives are aborted."""

    def synchronize(self):
        while dist.is_initialized():
            time.sleep(0.01)


def moment_of(event):
    moment = Moment(torch.device("cpu"))
    moment.event = event
    return moment


def test_a_main_thread_that_waits_for_the_device_is_woken_and_reads_nothing(groups):
    has_left = threading.Event()
    watcher = threading.Thread(target=module.interrupt, args=[has_left, lambda: pytest.fail("started again")])
    watcher.start()
    with pytest.raises(RunError, match="a rank is gone, and the collectives with it were aborted"):
        moment_of(Kernels()).wait()
    ranks.rejoin()
    has_left.set()
    watcher.join()
    moment_of(Kernels()).wait()  # in the next round


def test_a_main_thread_that_does_something_else_is_not_interrupted_until_it_waits(groups):
    """It may be launching a collective, whose memory an abort would free."""
    has_left = threading.Event()
    aborter = threading.Thread(target=ranks.abort_wait, args=[has_left])
    aborter.start()
    time.sleep(0.2)
    assert dist.is_initialized()
    with pytest.raises(RunError):
        moment_of(Kernels()).wait()
    aborter.join()


def test_a_main_thread_that_left_by_itself_is_left_alone(groups):
    has_left = threading.Event()
    has_left.set()
    module.interrupt(has_left, lambda: pytest.fail("started again"))
    ranks.abort_wait(has_left)
    assert dist.is_initialized() and not ranks.is_cut_off.is_set()


def test_a_process_whose_main_thread_does_not_leave_starts_again(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    has_left = threading.Event()
    module.interrupt(has_left, has_left.set)
    assert has_left.is_set()


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("elastic", "code"), [("yes", 0), ("no", 137)])
def test_a_process_that_crashes_after_another_was_lost_is_replaced(elastic, code):
    """NCCL ends processes whose peer is gone; the new one finishes, as any number above 1 does in this script."""
    command = [sys.executable, "-c", JOB, elastic, sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == code, done.stderr
    if elastic == "yes":
        assert "rank 0 is gone (SIGKILL): 1 are left\n" in done.stderr
        assert "rank 0 is gone (SIGABRT): 0 are left, and another one starts\n" in done.stderr
