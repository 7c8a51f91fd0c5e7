"""A thousand steps on two ranks that save and evaluate after each do not interfere with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.nightly import chaos


@pytest.mark.full
def test_a_thousand_steps_with_as_many_checkpoints_end(tmp_path):
    """With two collectives of a group in flight at once, a rank aborted after about 400 steps."""
    folder = tmp_path / "run"
    job = chaos.job(folder)
    job = replace(job, train=replace(job.train, steps=1000), eval=replace(job.eval, interval=1))
    processes = chaos.start(job, 2, folder)
    for process in processes:
        process.join(500)
    assert [process.exitcode for process in processes] == [0, 0], chaos.last_words(folder, 0)
    assert chaos.taken(folder) == 1000
