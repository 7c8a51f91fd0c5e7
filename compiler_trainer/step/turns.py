"""The order in which the programs of a step run, and the values that they carry to each other.

    one rank of the pipeline, 2 microbatches       accumulate 0, accumulate 1, apply
    two, 1f1b                                      A0, A1, F0 0, F1 0, F0 1, B1 0, F1 1, B0 0, ... R0, R1, U0, U1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from passes.communication.batch_overlap import microbatches_in
from passes.pipeline.tables import Table, in_order
from passes.pipeline.tasks import FORWARD, GATHER, OF_RANKS, Task, task_in
from passes.program import ir

Key = tuple[str, int | None]  # a carried value, and its microbatch; None: it is the same for all


class Turn(NamedTuple):
    """A program that is run, for a microbatch or for all together, by the ranks of a pipeline stage."""

    program: str
    microbatch: int | None
    rank: int = 0

    def __str__(self) -> str:
        return self.program if self.microbatch is None else f"{self.program} of microbatch {self.microbatch}"


def turns_of_step(programs: Mapping[str, ir.Program], table: Table | None, microbatches: int) -> tuple[Turn, ...]:
    """A training step."""
    if table is None:
        microbatches //= microbatches_in(programs.values())
        if microbatches == 1:
            return (Turn("step", 0),)
        gather = [Turn("gather", None)] if "gather" in programs else []
        return (*gather, *(Turn("accumulate", m) for m in range(microbatches)), Turn("apply", None))
    first = (Turn(str(Task(stage, GATHER)), None, rank) for stage, rank in enumerate(table.rank_of))
    turns = [turn for turn in first if turn.program in programs]
    turns += [Turn(str(slot.task), slot.microbatch, table.rank_of[slot.task.stage]) for slot in in_order(table)]
    for kind in OF_RANKS:
        last = (Turn(str(Task(rank, kind)), None, rank) for rank in range(table.ranks))
        turns += [turn for turn in last if turn.program in programs]
    return tuple(turns)


def turns_of_evaluation(
    name: str, programs: Mapping[str, ir.Program], table: Table | None, microbatches: int
) -> tuple[Turn, ...]:
    """An evaluation."""
    if table is None:
        return tuple(Turn(name, m) for m in range(microbatches // microbatches_in(programs.values())))
    stages = list(enumerate(table.rank_of))
    return tuple(Turn(f"{name}.{Task(s, FORWARD)}", m, rank) for m in range(microbatches) for s, rank in stages)


def slots_of(turns: Sequence[Turn], table: Table | None) -> dict[Turn, int]:
    """Where turns of microbatches are recorded: two that are in a stage at once in different slots, as are stages."""

    def passing(turn: Turn) -> tuple[int, int | None]:
        return task_in(turn.program).stage if table else 0, turn.microbatch

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


def sent_between(programs: Mapping[str, ir.Program]) -> frozenset[str]:
    """Names of what tasks of one stage, or rank, make for those of another."""
    made = {o.name: task_in(name).stage for name, p in programs.items() for o in p.outputs if o.kind == "carried"}
    reads = [(task_in(name).stage, given.name) for name, p in programs.items() for given in carried(p)]
    return frozenset(name for stage, name in reads if made[name] != stage)


Keys = dict[Turn, dict[str, Key]]


def keys_of(turns: Sequence[Turn], programs: Mapping[str, ir.Program]) -> tuple[Keys, Keys]:
    """The values that each turn reads of others, and those that it makes for them, by name."""
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
    """Carries values between the processes of pipeline ranks (`messages.py`)."""

    def begin(self) -> None: ...
    def start(self, turn: Turn) -> None: ...
    def send(self, key: Key, made: Mapping[int, Tensor]) -> None: ...
    def receive(self, key: Key) -> Tensor: ...
    def done(self, turn: Turn) -> None: ...
    def end(self) -> None: ...


class Carried:
    """Values on their way between the turns that run here, each kept until its last reader has it.

    `here` are the pipeline ranks of this process; values of others come by `post`.
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
        """A step begins."""
        self.values.clear()
        self.left = self.reads.copy()
        if self.post is not None:
            self.post.begin()

    def start(self, turn: Turn) -> None:
        """A turn begins."""
        if self.post is not None:
            self.post.start(turn)

    def put(self, turn: Turn, name: str, made: Mapping[int, Tensor]) -> None:
        """Keep what ranks have made if a turn here reads it, and send it to those elsewhere that do."""
        key = self.made_by[turn][name]
        if self.reads[key]:
            self.values[key] = dict(made)
        if self.post is not None:
            self.post.send(key, made)

    def get(self, turn: Turn, name: str, rank: int, apart: int) -> Tensor:
        """What a rank reads; ranks of different stages that stand alike are multiples of `apart` from each other."""
        key = self.read_by[turn][name]
        if key not in self.values and self.post is not None:
            self.values[key] = {rank: self.post.receive(key)}
        return next(value for made_by, value in self.values[key].items() if (made_by - rank) % apart == 0)

    def done(self, turn: Turn) -> None:
        """Forget what this turn was the last to read."""
        for key in self.read_by[turn].values():
            self.left[key] -= 1
            if not self.left[key]:
                del self.values[key]
        if self.post is not None:
            self.post.done(turn)

    def end(self) -> None:
        """A step ends: all that was sent has left."""
        if self.post is not None:
            self.post.end()


def carried(program: ir.Program) -> Iterator[ir.Input]:
    """The inputs that other tasks make."""
    return (given for given in program.inputs if given.kind == "carried")
