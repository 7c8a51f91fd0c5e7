"""The order in which a step's programs run, and the values that they carry to each other.

    one pipeline rank, 2 microbatches       accumulate 0, accumulate 1, apply
    two, 1f1b                               A0, A1, F0 0, F1 0, F0 1, B1 0, F1 1, B0 0, ... R0, R1, U0, U1

`passes/ir/task.py` explains the names of tasks; the number after a task is its microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from passes.communication.batch_overlap import microbatches_in
from passes.ir import ir
from passes.ir.task import FORWARD, GATHER, OF_RANKS, Task
from passes.pipeline.schedules import Schedule, in_order

Key = tuple[str, int | None]  # a carried value and its microbatch; None if it is the same for all


class Turn(NamedTuple):
    """A run of a program by a pipeline rank, for one microbatch or for all together; with stages, it runs a task."""

    program: str
    microbatch: int | None
    rank: int = 0
    task: Task | None = None

    def __str__(self) -> str:
        return self.program if self.microbatch is None else f"{self.program} of microbatch {self.microbatch}"


def turns_of_step(programs: Mapping[str, ir.Program], schedule: Schedule | None, microbatches: int) -> tuple[Turn, ...]:
    """Return the turns of a training step."""
    if schedule is None:
        microbatches //= microbatches_in(programs.values())
        if microbatches == 1:
            return (Turn("step", 0),)
        gather = [Turn("gather", None)] if "gather" in programs else []
        return (*gather, *(Turn("accumulate", m) for m in range(microbatches)), Turn("apply", None))
    tasks: list[tuple[Task, int | None]] = [(Task(stage, GATHER), None) for stage in range(schedule.stages)]
    tasks += [(slot.task, slot.microbatch) for slot in in_order(schedule)]
    tasks += [(Task(rank, kind), None) for kind in OF_RANKS for rank in range(schedule.ranks)]
    turns = (Turn(str(task), microbatch, schedule.rank(task), task) for task, microbatch in tasks)
    return tuple(turn for turn in turns if turn.microbatch is not None or turn.program in programs)


def turns_of_evaluation(
    name: str, programs: Mapping[str, ir.Program], schedule: Schedule | None, microbatches: int
) -> tuple[Turn, ...]:
    """Return the turns of an evaluation."""
    if schedule is None:
        return tuple(Turn(name, m) for m in range(microbatches // microbatches_in(programs.values())))
    tasks = [Task(stage, FORWARD) for stage in range(schedule.stages)]
    return tuple(Turn(f"{name}.{task}", m, schedule.rank(task), task) for m in range(microbatches) for task in tasks)


def slots_of(turns: Sequence[Turn]) -> dict[Turn, int]:
    """Return the recording slot of each microbatch's turn.

    Two microbatches in a stage at the same time have different slots, and so have two stages.
    """

    def stage_and_microbatch(turn: Turn) -> tuple[int, int | None]:
        return turn.task.stage if turn.task else 0, turn.microbatch

    microbatch_turns = [turn for turn in turns if turn.microbatch is not None]
    last = {stage_and_microbatch(turn): turn for turn in microbatch_turns}
    free, slot_of, slots = defaultdict[int, list[int]](list), dict[tuple[int, int | None], int](), dict[Turn, int]()
    for turn in microbatch_turns:
        position = stage, _ = stage_and_microbatch(turn)
        if position not in slot_of:
            slot_of[position] = free[stage].pop() if free[stage] else len({*slot_of.values()})
        slots[turn] = slot_of[position]
        if turn == last[position]:
            free[stage].append(slot_of[position])
    return slots


def sent_between(programs: Iterable[ir.Program]) -> frozenset[str]:
    """Return the names of values that tasks of one stage, or rank, make for those of another."""
    tasks = [(program.task.stage, program) for program in programs if program.task]
    stage_of = {output.name: stage for stage, p in tasks for output in p.outputs if output.kind == "carried"}
    return frozenset(entry.name for stage, p in tasks for entry in carried(p) if stage_of[entry.name] != stage)


Keys = dict[Turn, dict[str, Key]]


def keys_of(turns: Sequence[Turn], programs: Mapping[str, ir.Program]) -> tuple[Keys, Keys]:
    """Return the values that each turn reads from others, and those that it makes for others, by name."""
    makes = {
        turn: {o.name: (o.name, turn.microbatch) for o in programs[turn.program].outputs if o.kind == "carried"}
        for turn in turns
    }
    all_made = {key for values in makes.values() for key in values.values()}

    def key_read(name: str, microbatch: int | None) -> Key:
        return (name, microbatch) if (name, microbatch) in all_made else (name, None)

    reads = {
        turn: {i.name: key_read(i.name, turn.microbatch) for i in carried(programs[turn.program])} for turn in turns
    }
    return reads, makes


class Mail:
    """The carrier of values between the processes of pipeline ranks (`messages.py`); this one carries none."""

    def begin(self) -> None:
        """Begin a step."""

    def start(self, turn: Turn) -> None:
        """Begin a turn."""

    def send(self, key: Key, made: Mapping[int, Tensor]) -> None:
        """Send a value to the other processes that read it."""

    def receive(self, key: Key) -> Tensor:
        """Return a value of another process."""
        raise KeyError(key)

    def done(self, turn: Turn) -> None:
        """End a turn."""

    def end(self) -> None:
        """End a step: wait until everything has been sent."""


class CarriedValues:
    """Values on their way between the turns that run here, each kept until its last reader has it.

    `ranks` are the pipeline ranks of this process; values of other ranks come through `post`.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        programs: Mapping[str, ir.Program],
        ranks: Sequence[int] = (0,),
        post: Mail = Mail(),  # noqa: B008
    ):
        self.post = post
        self.keys_read, self.keys_made = keys_of(turns, programs)
        self.reads = Counter(
            key for turn, keys in self.keys_read.items() if turn.rank in ranks for key in keys.values()
        )
        self.values: dict[Key, dict[int, Tensor]] = {}
        self.readers_left = Counter[Key]()

    def begin(self) -> None:
        """Begin a step."""
        self.values.clear()
        self.readers_left = self.reads.copy()
        self.post.begin()

    def start(self, turn: Turn) -> None:
        """Begin a turn."""
        self.post.start(turn)

    def put(self, turn: Turn, name: str, values: Mapping[int, Tensor]) -> None:
        """Keep a value if a turn here reads it, and send it to other processes that do."""
        key = self.keys_made[turn][name]
        if self.reads[key]:
            self.values[key] = dict(values)
        self.post.send(key, values)

    def get(self, turn: Turn, name: str, rank: int, ranks_per_stage: int) -> Tensor:
        """Return the value for a rank; its counterparts in other stages are multiples of `ranks_per_stage` away."""
        key = self.keys_read[turn][name]
        if key not in self.values:
            self.values[key] = {rank: self.post.receive(key)}
        return next(
            value for source_rank, value in self.values[key].items() if (source_rank - rank) % ranks_per_stage == 0
        )

    def done(self, turn: Turn) -> None:
        """End a turn: drop the values for which it was the last reader."""
        for key in self.keys_read[turn].values():
            self.readers_left[key] -= 1
            if not self.readers_left[key]:
                del self.values[key]
        self.post.done(turn)

    def end(self) -> None:
        """End a step: wait until everything has been sent."""
        self.post.end()


def carried(program: ir.Program) -> Iterator[ir.Input]:
    """Yield the inputs that other tasks make."""
    return (entry for entry in program.inputs if entry.kind == "carried")
