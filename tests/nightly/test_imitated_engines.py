"""Jobs of the engines that start `launch` on each machine stop at a signal, and continue with the same bits."""

from __future__ import annotations

import pytest

from tests.nightly import engines


@pytest.mark.full
def test_jobs_of_engines_stop_and_continue(tmp_path):
    whole = tmp_path / "whole"
    assert engines.wait(engines.start(engines.ENGINES[0], whole)) == [0]
    for number, engine in enumerate(engines.ENGINES[3:5]):
        cells = engines.row(engine, tmp_path / str(number), whole).strip("| ").split(" | ")
        assert cells[3] == "3" and cells[4].endswith(f"because of {engine.signal.name}") and cells[5:] == ["0", "the same bits"]
