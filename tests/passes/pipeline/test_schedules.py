"""Schedules as data: orders and idle shares of known schedules, and schedules that are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from passes.ir.task import BACKWARD, FORWARD, INPUTS, WEIGHTS, Task
from passes.pipeline.schedules import (
    Schedule,
    Slot,
    forth_and_back,
    gpipe,
    in_order,
    interleaved,
    most_alive,
    one_f_one_b,
    play,
    zbv,
    zero_bubble,
)

SIZES = [(2, 2), (2, 5), (3, 5), (4, 8), (8, 16)]


def rows_of(schedule: Schedule) -> list[list[str]]:
    return [[f"{s.task.stage}{s.task.kind}{s.microbatch}" for s in row] for row in schedule.rows]


def rows_of_torch(schedule: type, rank_of: tuple[int, ...], microbatches: int) -> list[list[str]]:
    """Return PyTorch's order of the same schedule."""
    ranks = 1 + max(rank_of)
    first_stages = [stage for stage, rank in enumerate(rank_of) if rank == 0]
    common = {"group_size": ranks, "num_stages": len(rank_of), "group_rank": 0, "group": None, "has_backward": True}
    stages = [SimpleNamespace(stage_index=index, submod=None, **common) for index in first_stages]
    torch_schedule = schedule(stages, microbatches, loss_fn=lambda output, target: output)
    return [[str(action) for action in torch_schedule.pipeline_order[rank] if action] for rank in range(ranks)]


def test_the_rows_of_1f1b_are_those_of_the_docstring():
    result = [" ".join(f"{s.task.kind}{s.microbatch}" for s in row) for row in one_f_one_b(4, 6).rows]
    assert result == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 6)])
def test_interleaved_is_pytorchs(ranks, microbatches):
    schedule = interleaved(ranks, microbatches, 2)
    assert rows_of(schedule) == rows_of_torch(schedules.ScheduleInterleaved1F1B, schedule.rank_of, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 6), (8, 16)])
def test_zero_bubble_is_pytorchs(ranks, microbatches):
    schedule = zero_bubble(ranks, microbatches)
    assert rows_of(schedule) == rows_of_torch(schedules.ScheduleInterleavedZeroBubble, schedule.rank_of, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_zbv_is_no_more_idle_than_pytorchs_and_keeps_no_more(ranks, microbatches):
    result = zbv(ranks, microbatches)
    theirs = schedule_of(rows_of_torch(schedules.ScheduleZBVZeroBubble, forth_and_back(ranks), microbatches))
    assert play(result).idle <= play(theirs).idle
    assert max(most_alive(result)) <= max(most_alive(theirs))


def schedule_of(rows: list[list[str]]) -> Schedule:
    """Return a schedule of two stages per rank from PyTorch's text, such as `3F0`."""
    slots = [[Slot(Task(int(s[0 : s.index(k)]), k), int(s[s.index(k) + 1 :])) for s, k in map(kind, row)] for row in rows]
    return Schedule(forth_and_back(len(rows)), tuple(map(tuple, slots)))


def kind(action: str) -> tuple[str, str]:
    return action, next(letter for letter in action if letter.isalpha())


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_idle_shares_are_those_of_the_papers(ranks, microbatches):
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    assert play(gpipe(ranks, microbatches)).idle == pytest.approx(bubble)
    assert play(one_f_one_b(ranks, microbatches)).idle == pytest.approx(bubble)
    if microbatches >= ranks:
        assert play(zero_bubble(ranks, microbatches)).idle == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_what_ranks_keep(ranks, microbatches):
    assert most_alive(gpipe(ranks, microbatches)) == [microbatches] * ranks
    assert most_alive(one_f_one_b(ranks, microbatches)) == [min(microbatches, ranks - s) for s in range(ranks)]
    assert max(most_alive(zero_bubble(ranks, microbatches))) <= ranks
    assert max(most_alive(zbv(ranks, microbatches))) <= 2 * ranks


KNOWN: list[Callable[[int, int], Schedule]] = [gpipe, one_f_one_b, zero_bubble, zbv, lambda p, m: interleaved(p, m, 3)]


@pytest.mark.parametrize("make", KNOWN)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 2), (5, 7), (8, 3)])
def test_any_number_of_microbatches_ends(make, ranks, microbatches):
    schedule = make(ranks, microbatches)
    order = in_order(schedule)
    assert len(order) == sum(map(len, schedule.rows)) and schedule.microbatches == microbatches


@pytest.mark.parametrize("kinds", [(FORWARD, BACKWARD), (FORWARD, INPUTS, WEIGHTS)])
def test_a_table_that_never_ends_says_who_waits_for_what(kinds):
    rows = [[Slot(Task(stage, k), m) for m in range(2) for k in kinds] for stage in range(2)]
    for stage, k in ((0, 1), (1, 0)):  # rank 1 does all of the second microbatch before any of the first
        rows[stage] = rows[stage][len(kinds) :] + rows[stage][: len(kinds)] if k == 0 else rows[stage]
    with pytest.raises(ValueError, match=r"rank 0 at [BI]0.0 waits for [BI]0.1 of rank 1; rank 1 at F1.1 waits for F1.0"):
        play(Schedule((0, 1), tuple(map(tuple, rows))))


def test_a_table_that_lacks_or_repeats_a_slot_says_which():
    schedule = one_f_one_b(2, 3)
    first, second = schedule.rows
    with pytest.raises(ValueError, match=r"rank 1 never runs B2.1"):
        play(Schedule(schedule.rank_of, (first, second[:-1])))
    with pytest.raises(ValueError, match=r"rank 1 runs F0.1 2 times"):
        play(Schedule(schedule.rank_of, (first, (*second, second[0]))))
    with pytest.raises(ValueError, match=r"rank 0 runs F0.1, which is not its own"):
        play(Schedule(schedule.rank_of, ((*first, second[0]), second)))
