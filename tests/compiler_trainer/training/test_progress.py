"""Console output of a run."""

from __future__ import annotations

import pytest

from compiler_trainer.training import loggers


@pytest.mark.parametrize(("rank", "printed"), [(0, "all is well\n"), (1, "")])
def test_what_all_ranks_announce_is_printed_once(rank, printed, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "rank", lambda: rank)
    loggers.announce("all is well")
    assert capsys.readouterr().out == printed
