"""The remaining ranks name a killed rank in one line."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from compiler_trainer.training.failures import closed_connection
from tests.nightly.chaos import job, last_words, start, wait_for_steps


@pytest.mark.parametrize(
    ("ranks", "killed", "message"),
    [
        pytest.param(2, 1, "error: rank 1 is gone: it does not answer any more (", id="one of two"),
        pytest.param(2, 0, "error: rank 0 or its node is gone: the store at 127.0.0.1:", id="the first, with the store"),
        pytest.param(3, 2, "error: rank 2 is gone: it does not answer any more (", id="one of three", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_a_killed_rank_is_named_in_one_line(tmp_path, capsys, ranks, killed, message):
    cfg = job(tmp_path / "run")
    with capsys.disabled():  # they write to files of their own
        processes = start(replace(cfg, train=replace(cfg.train, steps=100_000)), ranks, tmp_path / "run")
    try:
        wait_for_steps(tmp_path / "run", processes)
        os.kill(processes[killed].pid, signal.SIGKILL)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    left = [number for number in range(ranks) if number != killed]
    words = "".join(last_words(tmp_path / "run", number) for number in left)
    lines = [line for line in words.splitlines() if line.startswith("error: ")]
    assert [processes[number].exitcode for number in left] == [1] * len(left), words
    assert len(lines) == 1 and lines[0].startswith(message) and "Traceback" not in words, words


def test_errors_that_are_of_no_connection_are_left_alone():
    of_gloo = "[pair.cc:547] Connection closed by peer [127.0.0.1]:7\nOriginal traceback:"
    assert closed_connection(RuntimeError(of_gloo)) == "Connection closed by peer [127.0.0.1]:7"
    assert closed_connection(ValueError(of_gloo)) == "" and closed_connection(RuntimeError("size 3 and 4")) == ""
