"""One run per folder: a second one is refused, a returning job notices, and foreign files stay untouched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from short_runs import options as short_run

from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.schema import CheckpointConfig, Config, RunConfig
from compiler_trainer.training import owner, trainer
from compiler_trainer.training.owner import FILE, Owner, owning

HOLD = """
import sys, time
from pathlib import Path
from compiler_trainer.training.owner import Owner
held = Owner("run.dir", Path(sys.argv[1]))
held.take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """Yield a folder that another process locks, and that process."""
    monkeypatch.setattr(owner, "PATIENCE_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield tmp_path / "run", process
    process.kill()
    process.wait()


def options(folder):
    return Config(run=RunConfig(str(folder)), checkpoint=CheckpointConfig())


def test_a_folder_that_another_process_holds_is_refused_by_name_until_that_is_killed(locked):
    folder, process = locked
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(UserError) as error, owning(options(folder)):
        pass
    host = os.uname().nodename
    assert str(error.value).startswith(f"run.dir: {folder} is in use by another run, process {process.pid} on {host} since 20")
    process.kill()
    process.wait()
    with owning(options(folder)) as owners:
        owners.check()
        assert json.loads((folder / FILE).read_text())["pid"] == os.getpid() and (folder / "checkpoints" / FILE).exists()


def test_nothing_is_left_of_a_run_that_did_not_begin(tmp_path):
    with owning(options(tmp_path / "a" / "run")):
        assert (tmp_path / "a" / "run" / FILE).exists()
    assert os.listdir(tmp_path) == []
    with owning(options(tmp_path / "a" / "run")):
        (tmp_path / "a" / "run" / "graphs").mkdir()
    assert os.listdir(tmp_path / "a" / "run") == ["graphs"]


def test_a_folder_is_as_it_was_after_a_run_that_was_refused_in_it(tmp_path):
    Owner("run.dir", tmp_path).take()
    before, at = (tmp_path / FILE).read_text(), (tmp_path / FILE).stat().st_mtime_ns
    with owning(replace(options(tmp_path), checkpoint=CheckpointConfig(interval=None))):
        assert (tmp_path / FILE).read_text() != before
    assert ((tmp_path / FILE).read_text(), (tmp_path / FILE).stat().st_mtime_ns) == (before, at)


def test_a_run_that_waited_for_one_that_left_nothing_locks_its_own_file(tmp_path):
    first, second = Owner("run.dir", tmp_path / "run"), Owner("run.dir", tmp_path / "run")
    first.take()
    waits = threading.Thread(target=second.take)
    waits.start()
    time.sleep(0.3)
    first.undo()
    waits.join()
    assert json.loads((tmp_path / "run" / FILE).read_text()) == json.loads(second.text)
    second.check(lambda: pytest.fail("it is there"))


def test_a_second_run_in_a_new_folder_is_refused_before_it_compiles(locked, monkeypatch):
    folder, _ = locked
    monkeypatch.setattr(trainer, "compile_step", lambda *args, **how: pytest.fail("it compiles"))
    with pytest.raises(UserError, match="is in use by another run"):
        trainer.train(short_run(folder))


def test_a_run_notices_the_one_that_took_its_place(tmp_path):
    mine = Owner("run.dir", tmp_path)
    mine.take()
    (tmp_path / FILE).write_text(json.dumps({"host": "other", "pid": 7, "began": "today", "token": "x"}))
    with pytest.raises(RunError, match=r"was taken by another run, process 7 on other since today; this run ends"):
        mine.check(lambda: None)


def test_a_folder_that_is_deleted_is_made_anew_and_said(tmp_path, capsys):
    cfg, restored = options(tmp_path / "run"), []
    with owning(cfg) as owners:
        owners.restore = lambda: restored.append((tmp_path / "run" / FILE).exists())
        owners.check()
        assert not restored
        shutil.rmtree(tmp_path / "run")
        owners.check()
        assert restored == [True, True]  # for the run folder and for its folder of checkpoints
        owners.check()
    assert capsys.readouterr().out.count("was deleted while a run writes to it") == 2


def test_a_run_without_checkpoints_owns_its_folder_alone(tmp_path):
    cfg = options(tmp_path / "run")
    with owning(replace(cfg, checkpoint=CheckpointConfig(interval=None))):
        assert os.listdir(tmp_path / "run") == [FILE]
