"""The simulation of goodput, against what can be computed by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.bench.goodput import Way, goodput, main

PAGE = Path(__file__).parents[3] / "docs" / "measured" / "goodput.md"
NEVER, MONTHS_S = 1e12, 100 * 24 * 3600.0


def share(way: Way, between_s: float, gpus: int = 1024) -> float:
    return goodput(way, gpus, between_s, MONTHS_S, random.Random(0))


def test_without_failures_only_copies_cost():
    assert share(Way("", 100.0, every_s=90.0, copy_s=10.0), NEVER) == pytest.approx(0.9)


def test_a_failure_costs_the_recovery_and_half_the_time_between_copies():
    assert share(Way("", recovery_s=200.0, every_s=100.0), 10_000.0) == pytest.approx(1 - (200 + 50) / 10_000, abs=5e-3)


def test_failures_during_a_recovery_begin_it_again():
    """The time to take a step is that to survive `recovery_s`: (exp(r / m) - 1) m, not r."""
    often = share(Way("", recovery_s=1000.0, every_s=20.0), 1000.0)
    assert often == pytest.approx(1 / 2.718 - 0.01, abs=0.02)


def test_a_smaller_job_is_slower_until_another_machine_joins():
    way = Way("", recovery_s=0.0, every_s=20.0, shrinks=True, joins_after_s=100.0)
    assert share(way, 10_000.0, gpus=32) == pytest.approx(1 - (0.25 * 100 + 10) / 10_000, abs=1e-3)


def test_the_page_has_the_table(capsys):
    main([])
    assert capsys.readouterr().out in PAGE.read_text()
