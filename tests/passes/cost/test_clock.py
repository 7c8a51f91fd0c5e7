"""The start and end of work on the streams of a clock."""

from __future__ import annotations

import pytest

from passes.cost.clock import COMPUTE, Clock, Span, Timing


def test_the_example_of_the_docstring():
    clock = Clock()
    assert clock.run("mm", COMPUTE, 3.0) == (0, 3, COMPUTE)
    assert clock.run("gather", "tp", 2.0, after=clock.now()) == (3, 5, "tp")
    assert clock.run("silu", COMPUTE, 1.0) == (3, 4, COMPUTE)
    assert clock.wait(clock.end("gather")) == 1.0
    assert clock.now() == 5.0 and clock.wait(4.0) == 0.0


def test_a_stream_runs_one_thing_at_a_time():
    clock = Clock()
    clock.run("a", "tp", 5.0, after=1.0)
    assert clock.run("b", "tp", 2.0, after=3.0) == (6, 8, "tp")
    assert clock.run("c", "cp", 2.0, after=3.0) == (3, 5, "cp")


@pytest.mark.parametrize(
    ("kernel_s", "end"),
    [(1.0, 2.0), (2.0, 4.0), (5.0, 7.0)],  # of 2 s of the collective's 4, then all of it, then more
)
def test_a_kernel_is_slower_while_a_collective_travels(kernel_s, end):
    clock = Clock()
    clock.run("gather", "tp", 4.0)
    assert clock.run("mm", COMPUTE, kernel_s, keeps=0.5).end == pytest.approx(end)
    assert clock.end("gather") == 4.0


def test_collectives_that_travel_or_queue_are_slower_while_a_kernel_runs():
    clock = Clock(sending=0.5)
    clock.run("past", "cp", 1.0)
    clock.wait(1.0)
    clock.run("first", "tp", 2.0, after=clock.now())
    clock.run("second", "tp", 3.0, after=clock.now())
    assert clock.run("mm", COMPUTE, 6.0) == (1, 7, COMPUTE)
    assert clock.spans["past"] == (0, 1, "cp")
    assert clock.spans["first"] == (1, 5, "tp")  # at half of its speed
    assert clock.spans["second"] == (5, 9, "tp")  # two seconds at half of its speed, two at all of it
    assert clock.now("tp") == 9


def test_a_timing_tells_busy_and_idle_time():
    timing = Timing({"a": Span(0, 3, 0), "b": Span(3, 4, 1), "c": Span(4, 8, 1)})
    assert timing.length == 8 and timing.busy == {0: 3, 1: 5}
    assert timing.idle == 0.5
    assert timing.of(lambda work: work != "c").length == 4
