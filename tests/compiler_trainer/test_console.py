"""Output that nobody reads, or that the disk does not take, ends no run."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO

import pytest

from compiler_trainer.console import say


class Full(StringIO):
    """An output whose disk is full."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_lines_that_cannot_be_written_are_dropped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    say("one")
    say("two")
    with pytest.raises(ZeroDivisionError):
        say(f"{1 / 0}")


def test_a_closed_pipe_ends_no_process():
    code = "from compiler_trainer.console import say\nimport time\nfor n in range(200):\n  say('x' * 1000)\nimport sys; sys.exit(7)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 7 and process.stderr.read() == ""
