"""Pipeline schedules as data: the order of each rank's tasks, one row per rank.

    1f1b, 4 ranks, 6 microbatches
    0  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
    1  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    2  F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
    3  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

A rank has one stage or several (chunks). Stage s is on rank s % P (interleaved), or stages go forth and back (V): ranks
0 1 2 3 have stages 0 1 2 3, then 7 6 5 4. Tables are made by list scheduling: a free rank runs the ready task that it
prefers. Known schedules are orders of preference; `auto` knows the cost of each task.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-flush, arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473), zero
bubble ZB-H1 and ZBV (arXiv 2401.10241, 2405.15362).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from passes.cost.clock import Clock, Timing
from passes.ir.task import BACKWARD, FORWARD, INPUTS, OF_RANKS, WEIGHTS, Task

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "auto")


class Slot(NamedTuple):
    """A task for a microbatch."""

    task: Task
    microbatch: int

    def __str__(self) -> str:
        return f"{self.task.kind}{self.microbatch}.{self.task.stage}"


TaskCosts = Callable[[Task], float]


@dataclass(frozen=True)
class Schedule:
    """The slots of each pipeline rank, in order; `rank_of` gives each stage's rank."""

    rank_of: tuple[int, ...]
    rows: tuple[tuple[Slot, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.rows)

    def rank(self, task: Task) -> int:
        """Return the pipeline rank that runs a task: that of the stage, or the one whose update it is."""
        return task.stage if task.kind in OF_RANKS else self.rank_of[task.stage]

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(slot.microbatch for row in self.rows for slot in row)

    @property
    def is_split(self) -> bool:
        """True if a backward is two tasks."""
        return any(slot.task.kind == WEIGHTS for row in self.rows for slot in row)


def predecessors(slot: Slot, stages: int, split: bool) -> Iterator[Slot]:
    """Yield the slots that must come before a slot: of its own stage, and of the stage that sends its input."""
    (stage, kind), m = slot.task, slot.microbatch
    back = INPUTS if split else BACKWARD
    if kind == FORWARD:
        if stage:
            yield Slot(Task(stage - 1, FORWARD), m)
    elif kind == WEIGHTS:
        yield Slot(Task(stage, INPUTS), m)
    else:
        yield Slot(Task(stage, FORWARD), m)
        if stage < stages - 1:
            yield Slot(Task(stage + 1, back), m)


# ---- times ----------------------------------------------------------------------------------------------


def unit(task: Task) -> float:
    """Return a cost at which a backward takes two forwards."""
    return 2.0 if task.kind == BACKWARD else 1.0


def play(schedule: Schedule, costs: TaskCosts = unit, send: float = 0.0) -> Timing:
    """Time the slots of a schedule, each rank a stream; a value reaches another rank `send` later.

    Raises ValueError if ranks would deadlock, or a task is missing.
    """
    check_complete(schedule)
    clock, left = Clock(), [list(row) for row in schedule.rows]
    while any(left):
        ready = [rank for rank, row in enumerate(left) if row and done_before(schedule, row[0]) <= clock.spans.keys()]
        if not ready:
            raise ValueError(stuck(schedule, left, clock.spans))  # type: ignore[arg-type]
        for rank in ready:
            slot = left[rank].pop(0)
            after = arrival(clock, done_before(schedule, slot), schedule.rank_of, rank, send)
            clock.run(slot, rank, costs(slot.task), after)
    return Timing(clock.spans)


def arrival(clock: Clock, needs: Iterable[Slot], rank_of: Sequence[int], rank: int, send: float) -> float:
    """Return the time at which a rank has the results of all slots in `needs`."""
    return max((clock.end(b) + (send if rank_of[b.task.stage] != rank else 0.0) for b in needs), default=0.0)


def done_before(schedule: Schedule, slot: Slot) -> set[Slot]:
    """Return the slots that a slot needs."""
    return set(predecessors(slot, schedule.stages, schedule.is_split))


def check_complete(schedule: Schedule) -> None:
    """Raise ValueError unless each rank runs each task of its stages once per microbatch, and no other task."""
    slots = {slot.task.kind: slot for row in schedule.rows for slot in row}
    if BACKWARD in slots and schedule.is_split:
        raise ValueError(f"has both {slots[BACKWARD]} and {slots[WEIGHTS]}; write B, or I and W, for all backwards")
    kinds = (FORWARD, INPUTS, WEIGHTS) if schedule.is_split else (FORWARD, BACKWARD)
    for rank, row in enumerate(schedule.rows):
        stages = [stage for stage, owner in enumerate(schedule.rank_of) if owner == rank]
        wanted = {Slot(Task(s, k), m) for s in stages for k in kinds for m in range(schedule.microbatches)}
        if missing := sorted(wanted - set(row)):
            raise ValueError(f"rank {rank} never runs {missing[0]}")
        if twice := sorted(slot for slot in set(row) if row.count(slot) > 1):
            raise ValueError(f"rank {rank} runs {twice[0]} {row.count(twice[0])} times")
        if foreign := sorted(set(row) - wanted):
            raise ValueError(f"rank {rank} runs {foreign[0]}, which is not its own: its stages are {stages}")


def stuck(schedule: Schedule, left: Sequence[Sequence[Slot]], done: Iterable[Slot]) -> str:
    """Return a message with the slot for which each rank waits."""
    waits = []
    for rank, row in enumerate(left):
        if row and (missing := sorted(done_before(schedule, row[0]) - set(done))):
            made_by = schedule.rank_of[missing[0].task.stage]
            waits.append(f"rank {rank} at {row[0]} waits for {missing[0]} of rank {made_by}")
    return f"the schedule deadlocks: {'; '.join(waits)}"


def in_order(schedule: Schedule) -> list[Slot]:
    """Return all slots, each after the slots that it needs."""
    spans = play(schedule).spans
    return sorted(spans, key=lambda slot: (spans[slot][0], schedule.rank_of[slot.task.stage], slot))


def most_alive(schedule: Schedule) -> list[int]:
    """Return the most forwards that each rank keeps for their backward at a time."""
    peaks = []
    for row in schedule.rows:
        alive = peak = 0
        for slot in row:
            alive += {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}.get(slot.task.kind, 0)
            peak = max(peak, alive)
        peaks.append(peak)
    return peaks


# ---- as text ------------------------------------------------------------------------------------------------

HEAD = "# one line per rank: F forward, B backward, or I (inputs) and W (weights) for B; F0.2: microbatch 0, stage 2"
WRITTEN = re.compile(r"([FBIW])(\d{1,6})\.(\d{1,6})")


def as_text(schedule: Schedule) -> str:
    """Return one line per rank, which `from_text` reads."""
    return "\n".join([HEAD, *(" ".join(map(str, row)) for row in schedule.rows)]) + "\n"


def from_text(text: str) -> Schedule:
    """Return the schedule in a text; raise ValueError with rank and slot if it is invalid or deadlocks."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise ValueError("is empty; write a line of tasks for each rank, such as F0.0 B0.0")
    rows = tuple(tuple(slot_of(rank, word) for word in line.split()) for rank, line in enumerate(lines))
    ranks = {slot.task.stage: rank for rank, row in reversed([*enumerate(rows)]) for slot in row}
    if missing := sorted({*range(1 + max(ranks, default=0))} - ranks.keys()):
        raise ValueError(f"no rank runs stage {missing[0]}")
    schedule = Schedule(tuple(ranks[stage] for stage in sorted(ranks)), rows)
    play(schedule)
    return schedule


def slot_of(rank: int, word: str) -> Slot:
    """Return the slot in a word of a rank's line."""
    match = WRITTEN.fullmatch(word)
    if match is None:
        raise ValueError(f"rank {rank} runs {word!r}; write F0.2 for the forward of microbatch 0 in stage 2")
    return Slot(Task(int(match[3]), match[1]), int(match[2]))


# ---- placements of stages ----------------------------------------------------------------------------------


def ranks_in_turn(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the ranks of stages if stage s is on rank s % ranks."""
    return tuple(range(ranks)) * chunks


def forth_and_back(ranks: int) -> tuple[int, ...]:
    """Return the ranks of stages with two stages per rank: the first rank has the first and the last."""
    return (*range(ranks), *reversed(range(ranks)))


# ---- known schedules -----------------------------------------------------------------------------------------


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return the schedule with all forwards, then all backwards."""
    rows = []
    for stage in range(ranks):
        forward = [Slot(Task(stage, FORWARD), m) for m in range(microbatches)]
        rows.append((*forward, *(Slot(Task(stage, BACKWARD), m) for m in range(microbatches))))
    return Schedule(ranks_in_turn(ranks, 1), tuple(rows))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B: each stage runs a forward for every stage after it, then one forward and one backward in turn."""
    rows = []
    for stage in range(ranks):
        early = min(microbatches, ranks - 1 - stage)
        rows.append(tuple(alternate(early, forwards([stage], 1, microbatches), backwards([stage], 1, microbatches))))
    return Schedule(ranks_in_turn(ranks, 1), tuple(rows))


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return 1F1B over several stages per rank; microbatches go through a chunk in groups of the number of ranks.

    If the groups are not full, the schedule comes from list scheduling, and a rank keeps as many forwards.
    """
    if microbatches % ranks:
        limits = [1 + (chunks - 1) * ranks + 2 * (ranks - 1 - rank) for rank in range(ranks)]
        return list_schedule(ranks_in_turn(ranks, chunks), microbatches, limits, limits, unit, split=False)
    rows = []
    for rank in range(ranks):
        stages = list(range(rank, ranks * chunks, ranks))
        early = min(microbatches * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - rank))
        forward, backward = forwards(stages, ranks, microbatches), backwards(stages, ranks, microbatches)
        rows.append(tuple(alternate(early, forward, backward)))
    return Schedule(ranks_in_turn(ranks, chunks), tuple(rows))


def forwards(stages: Sequence[int], group: int, microbatches: int) -> list[Slot]:
    """Return the forwards of a rank: groups of microbatches through one stage after the other."""
    starts = range(0, microbatches, group)
    return [
        Slot(Task(stage, FORWARD), m)
        for start in starts
        for stage in stages
        for m in range(start, min(start + group, microbatches))
    ]


def backwards(stages: Sequence[int], group: int, microbatches: int) -> list[Slot]:
    """Return the backwards of a rank, from its last stage to its first."""
    slots = forwards(list(reversed(stages)), group, microbatches)
    return [Slot(Task(slot.task.stage, BACKWARD), slot.microbatch) for slot in slots]


def alternate(early: int, forward: Sequence[Slot], backward: Sequence[Slot]) -> Iterator[Slot]:
    """Yield some forwards, then one forward and one backward in turn, then the remaining backwards."""
    yield from forward[:early]
    for k, slot in enumerate(forward[early:]):
        yield slot
        yield backward[k]
    yield from backward[len(forward) - early :]


def list_schedule(
    rank_of: Sequence[int],
    microbatches: int,
    early: Sequence[int],
    alive: Sequence[int],
    costs: TaskCosts,
    send: float = 0.0,
    split: bool = True,
) -> Schedule:
    """Return the schedule in which a free rank runs the slot that can start first.

    At equal times backwards, then F, then W. A rank is at most `early` forwards ahead of its backwards, and keeps at
    most `alive` until W. Backwards are two tasks if they are `split`.
    """
    kinds = (INPUTS, FORWARD, WEIGHTS) if split else (BACKWARD, FORWARD)
    ranks, stages = 1 + max(rank_of), len(rank_of)
    clock, ahead, alive_now = Clock(), [0] * ranks, [0] * ranks
    rows: list[list[Slot]] = [[] for _ in range(ranks)]
    left = {Task(s, k): list(range(microbatches)) for s in range(stages) for k in kinds}
    while any(left.values()):
        best: tuple[tuple[float, ...], Slot, float] | None = None
        for task, waiting in left.items():
            if not waiting:
                continue
            rank, slot = rank_of[task.stage], Slot(task, waiting[0])
            needs = list(predecessors(slot, stages, split))
            later = sum(owner == rank for owner in rank_of[task.stage + 1 :])  # later stages need room, too
            is_full = ahead[rank] + later >= early[rank] or alive_now[rank] + later >= alive[rank]
            if any(b not in clock.spans for b in needs) or task.kind == FORWARD and is_full:
                continue
            after = arrival(clock, needs, rank_of, rank, send)
            key = (max(clock.now(rank), after), kinds.index(task.kind), slot.microbatch, -task.stage)
            if best is None or key < best[0]:
                best = key, slot, after
        assert best is not None, "memory for one microbatch in each stage lets every schedule end"
        _, slot, after = best
        rank = rank_of[slot.task.stage]
        left[slot.task].pop(0)
        rows[rank].append(slot)
        clock.run(slot, rank, costs(slot.task), after)
        ahead[rank] += {FORWARD: 1, WEIGHTS: 0}.get(slot.task.kind, -1)
        alive_now[rank] += {FORWARD: 1, WEIGHTS: -1, BACKWARD: -1}.get(slot.task.kind, 0)
    return Schedule(tuple(rank_of), tuple(map(tuple, rows)))


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B whose stage s delays weights' gradients by s microbatches.

    It keeps as much as 1F1B's first stage.
    """
    rows = []
    for stage in range(ranks):
        forward = [Slot(Task(stage, FORWARD), m) for m in range(microbatches)]
        row, left = forward[: ranks - stage], forward[ranks - stage :]
        for m in range(microbatches):
            row.append(Slot(Task(stage, INPUTS), m))
            row += [Slot(Task(stage, WEIGHTS), m - stage)] if m >= stage else []
            row += left[:1]
            left = left[1:]
        row += [Slot(Task(stage, WEIGHTS), m) for m in range(max(0, microbatches - stage), microbatches)]
        rows.append(tuple(row))
    return Schedule(ranks_in_turn(ranks, 1), tuple(rows))


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Return ZBV: two stages per rank, forth and back; each rank keeps as many forwards as 1F1B's first.

    With few microbatches the paper's order waits longer than list scheduling.
    """
    alive = [2 * ranks] * ranks
    greedy = list_schedule(forth_and_back(ranks), microbatches, alive, alive, unit)
    if microbatches < 2 * ranks:
        return greedy
    paper = Schedule(forth_and_back(ranks), tuple(tuple(zbv_row(rank, ranks, microbatches)) for rank in range(ranks)))
    return min(paper, greedy, key=lambda schedule: play(schedule).idle)


def zbv_row(rank: int, ranks: int, microbatches: int) -> Iterator[Slot]:
    """Yield a rank's slots in the paper's order; `forth` is its early stage, `back` its late one."""
    forth, back = rank, 2 * ranks - 1 - rank
    numbers = Counter[Task]()

    def run(stage: int, kinds: str) -> Iterator[Slot]:
        for kind in kinds:
            task = Task(stage, kind)
            if numbers[task] < microbatches:
                yield Slot(task, numbers[task])
                numbers[task] += 1

    for _ in range(2 * (ranks - rank) - 1):
        yield from run(forth, "F")
    for _ in range(rank):
        yield from run(back, "F")
        yield from run(forth, "F")
    for _ in range(ranks - rank):
        yield from run(back, "FIW")
    while numbers[Task(back, FORWARD)] < microbatches:
        yield from run(forth, "FIW")
        yield from run(back, "FIW")
    for _ in range(rank):
        yield from run(forth, "I")
        yield from run(back, "I")
    for _ in range(ranks - rank):
        yield from run(forth, "IW")
    for stage in (back, forth):
        while numbers[Task(stage, WEIGHTS)] < microbatches:
            yield from run(stage, "W")


def auto(ranks: int, microbatches: int, costs: TaskCosts = unit) -> Schedule:
    """Return the shortest of several schedules with split backwards that keep no more than 1F1B's first stage."""
    alive, rank_of = [ranks] * ranks, ranks_in_turn(ranks, 1)
    as_1f1b = [ranks - rank for rank in range(ranks)]
    candidates = [list_schedule(rank_of, microbatches, early, alive, costs) for early in (alive, as_1f1b)]
    return min([zero_bubble(ranks, microbatches), *candidates], key=lambda schedule: play(schedule, costs).length)
