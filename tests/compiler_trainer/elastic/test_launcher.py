"""Processes keep their place on the machine, and with it their GPU; a new one takes the place of a lost one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from compiler_trainer.elastic.launcher import Launcher
from compiler_trainer.elastic.member import ELASTIC, OUT

NAMES = "['COMPILER_TRAINER_MEMBER', 'COMPILER_TRAINER_SLOT', 'LOCAL_RANK']"
WAITING = f"import json, os, sys, time; print(json.dumps([os.environ[n] for n in {NAMES}]), file=open(sys.argv[1] + '/' + os.environ['COMPILER_TRAINER_MEMBER'], 'w')); time.sleep(60)"


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(3, [sys.executable, "-c", WAITING, str(tmp_path)], spares=3, elastic=True)
    launcher.begin_round(range(3))
    for _ in range(3):
        launcher.start()
    yield launcher
    for pid in launcher.members:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    launcher.folder.rmdir()


def end(launcher, member, code):
    """End a process as the launcher sees it; return the slots of those that are left, by number."""
    (pid,) = (pid for pid, number in launcher.members.items() if number == member)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    launcher.ended(pid, code)
    return {launcher.members[pid]: slot for pid, slot in launcher.slots.items()}


def test_a_new_process_takes_the_place_of_a_lost_one(launcher, tmp_path):
    assert launcher.store.check([ELASTIC])
    assert end(launcher, 1, -signal.SIGKILL) == {0: 0, 2: 2, 3: 1}
    assert end(launcher, 0, -signal.SIGKILL) == {2: 2, 3: 1, 4: 0}
    deadline = time.monotonic() + 30
    while not (path := Path(tmp_path, "3")).exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert json.loads(path.read_text()) == ["3", "1", "1"]


def test_the_place_of_a_process_that_was_left_out_stays_free(launcher, capfd):
    launcher.store.set(OUT.format(1), "a reason")
    assert end(launcher, 1, 0) == {0: 0, 2: 2}
    assert capfd.readouterr().err == "rank 1 is left out (a reason): 2 are left\n"
    assert launcher.listed == [0, 2] and launcher.code == 0
    assert end(launcher, 2, -signal.SIGKILL) == {0: 0, 3: 2}
    assert launcher.free_slot() == 3


def test_a_process_that_ends_well_is_not_replaced(launcher, capfd):
    assert end(launcher, 1, 0) == {0: 0, 2: 2}
    assert capfd.readouterr().err == "" and launcher.listed == [0, 1, 2]
