"""Processes started undisturbed outlive the signals that this process handles, and no others."""

from __future__ import annotations

import signal
import subprocess

import pytest

from passes.signals import undisturbed

COMPILER = ["sh", "-c", "kill -INT $$; kill -TERM $$; echo done"]


def compiled() -> str:
    return subprocess.run(COMPILER, capture_output=True, text=True).stdout


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_compiler_ends_its_work_where_signals_are_handled(handlers):
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: None)
    assert compiled() == ""
    assert undisturbed(compiled)() == "done\n"
    assert compiled() == "", "the mask is put back"


def test_a_signal_that_ends_this_process_ends_it_too(handlers):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert undisturbed(compiled)() == ""
