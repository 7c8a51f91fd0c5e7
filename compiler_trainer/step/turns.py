"""The order in which a step's programs run, and the values that they carry to each other.

    one pipeline rank, 2 microbatches       accumulate 0, accumulate 1, apply
    two, 1f1b                               A0, A1, F0 0, F1 0, F0 1, B1 0, F1 1, B0 0, ... R0, R1, U0, U1

`passes/program/task.py` explains the names of tasks; the number after a task is its microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from passes.communication.batch_overlap import microbatches_in
from passes.pipeline.tables import Table, in_order
from passes.program import ir
from passes.program.task import FORWARD, GATHER, OF_RANKS, Task

Key = tuple[str, int | None]  # a carried value and its microbatch; None if it is the same for all


class Turn(NamedTuple):
    """A run of a program by a pipeline rank, for one microbatch or for all together; with stages, it runs a task."""

    program: str
    microbatch: int | None
    rank: int = 0
    task: Task | None = None

    def __str__(self) -> str:
        return self.program if self.microbatch is None else f"{self.program} of microbatch {self.microbatch}"


def turns_of_step(programs: Mapping[str, ir.Program], table: Table | None, microbatches: int) -> tuple[Turn, ...]:
    """Return the turns of a training step."""
    if table is None:
        microbatches //= microbatches_in(programs.values())
        if microbatches == 1:
            return (Turn("step", 0),)
        gather = [Turn("gather", None)] if "gather" in programs else []
        return (*gather, *(Turn("accumulate", m) for m in range(microbatches)), Turn("apply", None))
    tasks: list[tuple[Task, int | None]] = [(Task(stage, GATHER), None) for stage in range(table.stages)]
    tasks += [(slot.task, slot.microbatch) for slot in in_order(table)]
    tasks += [(Task(rank, kind), None) for kind in OF_RANKS for rank in range(table.ranks)]
    turns = (Turn(str(task), microbatch, table.rank(task), task) for task, microbatch in tasks)
    return tuple(turn for turn in turns if turn.microbatch is not None or turn.program in programs)


def turns_of_evaluation(
    name: str, programs: Mapping[str, ir.Program], table: Table | None, microbatches: int
) -> tuple[Turn, ...]:
    """Return the turns of an evaluation."""
    if table is None:
        return tuple(Turn(name, m) for m in range(microbatches // microbatches_in(programs.values())))
    tasks = [Task(stage, FORWARD) for stage in range(table.stages)]
    return tuple(Turn(f"{name}.{task}", m, table.rank(task), task) for m in range(microbatches) for task in tasks)


def slots_of(turns: Sequence[Turn]) -> dict[Turn, int]:
    """Return the recording slot of each microbatch's turn.

    Two microbatches in a stage at the same time have different slots, and so have two stages.
    """

    def passing(turn: Turn) -> tuple[int, int | None]:
        return turn.task.stage if turn.task else 0, turn.microbatch

    of_microbatches = [turn for turn in turns if turn.microbatch is not None]
    last = {passing(turn): turn for turn in of_microbatches}
    free, taken, slots = defaultdict[int, list[int]](list), dict[tuple[int, int | None], int](), dict[Turn, int]()
    for turn in of_microbatches:
        here = stage, _ = passing(turn)
        if here not in taken:
            taken[here] = free[stage].pop() if free[stage] else len({*taken.values()})
        slots[turn] = taken[here]
        if turn == last[here]:
            free[stage].append(taken[here])
    return slots


def sent_between(programs: Iterable[ir.Program]) -> frozenset[str]:
    """Return the names of values that tasks of one stage, or rank, make for those of another."""
    tasks = [(program.task.stage, program) for program in programs if program.task]
    made = {output.name: stage for stage, p in tasks for output in p.outputs if output.kind == "carried"}
    return frozenset(given.name for stage, p in tasks for given in carried(p) if made[given.name] != stage)


Keys = dict[Turn, dict[str, Key]]


def keys_of(turns: Sequence[Turn], programs: Mapping[str, ir.Program]) -> tuple[Keys, Keys]:
    """Return the values that each turn reads from others, and those that it makes for others, by name."""
    makes = {
        turn: {o.name: (o.name, turn.microbatch) for o in programs[turn.program].outputs if o.kind == "carried"}
        for turn in turns
    }
    made = {key for found in makes.values() for key in found.values()}

    def read(name: str, microbatch: int | None) -> Key:
        return (name, microbatch) if (name, microbatch) in made else (name, None)

    reads = {turn: {i.name: read(i.name, turn.microbatch) for i in carried(programs[turn.program])} for turn in turns}
    return reads, makes


class Mail(Protocol):
    """The interface that carries values between the processes of pipeline ranks (`messages.py`)."""

    def begin(self) -> None: ...
    def start(self, turn: Turn) -> None: ...
    def send(self, key: Key, made: Mapping[int, Tensor]) -> None: ...
    def receive(self, key: Key) -> Tensor: ...
    def done(self, turn: Turn) -> None: ...
    def end(self) -> None: ...


class Carried:
    """Values on their way between the turns that run here, each kept until its last reader has it.

    `here` are the pipeline ranks of this process; values of other ranks come through `post`.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        programs: Mapping[str, ir.Program],
        here: Sequence[int] = (0,),
        post: Mail | None = None,
    ):
        self.post = post
        self.read_by, self.made_by = keys_of(turns, programs)
        self.reads = Counter(key for turn, keys in self.read_by.items() if turn.rank in here for key in keys.values())
        self.values: dict[Key, dict[int, Tensor]] = {}
        self.left = Counter[Key]()

    def begin(self) -> None:
        """Begin a step."""
        self.values.clear()
        self.left = self.reads.copy()
        if self.post is not None:
            self.post.begin()

    def start(self, turn: Turn) -> None:
        """Begin a turn."""
        if self.post is not None:
            self.post.start(turn)

    def put(self, turn: Turn, name: str, made: Mapping[int, Tensor]) -> None:
        """Keep a value if a turn here reads it, and send it to other processes that do."""
        key = self.made_by[turn][name]
        if self.reads[key]:
            self.values[key] = dict(made)
        if self.post is not None:
            self.post.send(key, made)

    def get(self, turn: Turn, name: str, rank: int, apart: int) -> Tensor:
        """Return the value for a rank; its counterparts in other stages are multiples of `apart` away."""
        key = self.read_by[turn][name]
        if key not in self.values and self.post is not None:
            self.values[key] = {rank: self.post.receive(key)}
        return next(value for made_by, value in self.values[key].items() if (made_by - rank) % apart == 0)

    def done(self, turn: Turn) -> None:
        """End a turn: drop the values for which it was the last reader."""
        for key in self.read_by[turn].values():
            self.left[key] -= 1
            if not self.left[key]:
                del self.values[key]
        if self.post is not None:
            self.post.done(turn)

    def end(self) -> None:
        """End a step: wait until everything has been sent."""
        if self.post is not None:
            self.post.end()


def carried(program: ir.Program) -> Iterator[ir.Input]:
    """Yield the inputs that other tasks make."""
    return (given for given in program.inputs if given.kind == "carried")
