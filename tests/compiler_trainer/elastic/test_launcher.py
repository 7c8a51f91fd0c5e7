"""Processes keep their place on the machine, and with it their GPU; a new one takes the place of a lost one."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.elastic import launcher
from compiler_trainer.elastic.engines import Place
from compiler_trainer.elastic.machine import ORDERS, Machine
from compiler_trainer.elastic.member import ELASTIC, OUT
from compiler_trainer.elastic.rounds import Rounds

NAMES = "['COMPILER_TRAINER_MEMBER', 'COMPILER_TRAINER_SLOT', 'LOCAL_RANK']"
WAITING = f"""
import json, os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
path = sys.argv[1] + '/' + os.environ['COMPILER_TRAINER_MEMBER']
print(json.dumps([os.environ[n] for n in {NAMES}]), file=open(path + '.part', 'w'), flush=True)
os.rename(path + '.part', path)
time.sleep(60)
"""
PATIENCE_S = 30


class Job:
    """A job on one machine, without a thread or a loop."""

    def __init__(self, folder):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.folder, self.machine = folder, Machine(store, [sys.executable, "-c", WAITING, str(folder)], "", 3, 0, 1)
        self.rounds = Rounds(store, 1, spares=3)
        store.set(ELASTIC, "")
        self.poll()
        self.until(lambda: all(Path(folder, str(member)).exists() for member in range(3)))

    def poll(self):
        self.rounds.poll()
        code = self.machine.poll()
        self.rounds.poll()
        self.machine.poll()
        return code

    def until(self, condition):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def end(self, member, number=signal.SIGKILL):
        """End a process; return the slots of those that are there then, by number."""
        (pid,) = (pid for pid, process in self.machine.processes.items() if process.member == member)
        os.kill(pid, number)
        self.until(lambda: self.poll() is not None or pid not in self.machine.processes)
        self.poll()  # the process may have ended after the first machine last looked
        return dict(self.machine.processes.values())


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.machine.send(signal.SIGKILL)
    job.until(lambda: not [*job.machine.reaped()] and not job.machine.processes)


def test_a_new_process_takes_the_place_of_a_lost_one(job):
    assert job.end(1) == {0: 0, 2: 2, 3: 1}
    assert job.end(0) == {2: 2, 3: 1, 4: 0}
    job.until(Path(job.folder, "3").exists)
    assert json.loads(Path(job.folder, "3").read_text()) == ["3", "1", "1"]


def test_the_place_of_a_process_that_was_left_out_stays_free(job, capfd):
    job.machine.store.set(OUT.format(1), "a reason")
    assert job.end(1, signal.SIGUSR1) == {0: 0, 2: 2}
    assert capfd.readouterr().err == "rank 1 is left out (a reason): 2 are left\n"
    assert job.rounds.listed == [0, 2] and job.rounds.code == 0
    assert job.end(2) == {0: 0, 3: 2}
    assert job.machine.free_slot() == 3


def test_a_process_that_ends_well_is_not_replaced(job, capfd):
    assert job.end(1, signal.SIGUSR1) == {0: 0, 2: 2}
    assert capfd.readouterr().err == "" and job.rounds.listed == [0, 1, 2]


def test_a_job_is_over_when_all_have_ended(job):
    for member in (0, 1, 2):
        job.end(member, signal.SIGUSR1)
    assert job.poll() == 0 and job.rounds.is_over


def test_processes_that_a_signal_asked_to_end_are_not_replaced(job):
    job.machine.forward(signal.SIGTERM)
    job.until(lambda: job.poll() is not None)
    assert job.rounds.code == 128 + signal.SIGTERM and job.rounds.spares == 3


def test_processes_that_do_not_end_are_killed_in_the_end(job):
    (pid,) = [pid for pid, process in job.machine.processes.items() if process.member == 0]
    os.kill(pid, signal.SIGSTOP)  # it does not react to SIGTERM
    job.machine.forward(signal.SIGTERM)
    job.until(lambda: job.poll() is not None or len(job.machine.processes) == 1)
    job.machine.deadline = time.monotonic() - 1
    job.until(lambda: job.poll() is not None)


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"^--master-port: {port} is in use on this machine; choose another port"):
            launcher.store_at(Place("launch", 0, 2, 0, 1, "127.0.0.1", port, "1"))


def test_a_first_machine_that_is_not_there_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(launcher, "timedelta", lambda seconds: timedelta(seconds=1))
    with pytest.raises(RunError, match=rf"^machine 1 cannot reach the first machine at 127.0.0.1:{port} within 600 s; it must run"):
        launcher.store_at(Place("launch", 1, 2, 0, 1, "127.0.0.1", port, "1"))


def test_orders_are_empty_at_first():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    machine = Machine(store, ["false"], "", 2, 1, 2)
    assert machine.poll() is None and not machine.processes and not store.check([ORDERS.format(machine.number)])
