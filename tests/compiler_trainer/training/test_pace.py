"""Slow ranks and loss spikes are reported."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
from short_runs import options

from compiler_trainer.elastic.member import LeftOut
from compiler_trainer.training.anomalies import FEWEST, Pace, Spikes, covered_time


@pytest.mark.parametrize(("spans", "total"), [
    ([], 0.0),
    ([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0)], 4.0),
    ([(0.0, 9.0), (1.0, 2.0)], 9.0),
    ([(5.0, 6.0), (0.0, 1.0), (0.5, 1.5)], 2.5),
])
def test_time_in_at_least_one_span(spans, total):
    assert covered_time(spans) == total


def test_a_rank_is_named_when_it_is_slow_twice(tmp_path, capsys):
    pace = Pace(options(tmp_path), False)
    first = pace.compare(100, [50.0, 90.0, 52.0], [0.5, 0.1, 0.3])
    assert first == {"busy_ms_median": 52.0, "busy_ms_max": 90.0, "slowest_rank": 1.0, "wait_share": pytest.approx(0.3)}
    assert capsys.readouterr().out == ""
    pace.compare(200, [50.0, 91.0, 52.0], [0.5, 0.1, 0.3])
    assert capsys.readouterr().out == "step 200: rank 1 works 91 ms, the median rank 52 ms; the others wait for it\n"


@pytest.mark.parametrize(("busy", "is_out"), [
    ([50.0, 160.0, 52.0], True),
    ([50.0, 140.0, 52.0], False),
    ([50.0, 160.0, 52.0, 52.0, 160.0], False),  # two ranks have more rows than the others
])
def test_a_rank_that_is_too_slow_is_left_out(busy, is_out, tmp_path):
    cfg = options(tmp_path)
    pace = Pace(replace(cfg, run=replace(cfg.run, elastic=True, most_slowdown=3.0)), False)
    pace.compare(100, busy, [0.1] * len(busy))
    with pytest.raises(LeftOut, match="^rank 1 works 160 ms, the median rank 52 ms$") if is_out else nullcontext() as caught:
        pace.compare(200, busy, [0.1] * len(busy))
    assert not is_out or caught.value.ranks == {1}


def test_ranks_that_take_turns_are_not_named(tmp_path, capsys):
    pace = Pace(options(tmp_path), False)
    for number, busy in enumerate([[90.0, 50.0], [50.0, 90.0], [50.0, 51.0], [50.0, 90.0]]):
        pace.compare(number, busy, [0.1, 0.1])
    assert capsys.readouterr().out == ""


def test_a_loss_that_jumps_is_said_and_one_that_falls_or_rustles_is_not():
    spikes, draws = Spikes(), random.Random(0)
    output = [spikes.message(n, 5.0 - 0.02 * n + draws.gauss(0, 0.05)) for n in range(100)]
    assert not any(output)
    assert spikes.message(101, 8.0).startswith("step 101: the loss jumps to 8.000, far from 3.5")
    assert not spikes.message(102, 3.0)


def test_a_level_that_stays_becomes_the_usual_one():
    spikes = Spikes()
    for n in range(FEWEST):
        spikes.message(n, 1.0 + 0.01 * (n % 2))
    assert sum(bool(spikes.message(n, 2.0 + 0.01 * (n % 2))) for n in range(300)) < 2 * FEWEST
