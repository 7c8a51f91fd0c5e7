"""Messages between the processes of pipeline ranks: when to post each receive, and when to free each sent tensor.

A rank may wait for its whole device at any time: Triton tunes a kernel at its first launch, the allocator returns
memory, host memory is pinned. Such a wait includes all sends and receives in flight. If several ranks wait for each
other's later turns in this way, the job hangs. On an H100, each pipeline job hung in its first step while receives were
posted a fixed number of messages ahead.

One order of all turns, the same on every rank, prevents this: a receive is posted before the receiver's first turn that
comes after the turn that makes the value. Of the ranks that wait for their device, the one whose turn comes first in
that order waits only for earlier turns, which are done, and each of those receives is posted. The order is by the times
at which turns end if nothing is late, so a receive is posted before a turn of the receiver that hides it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compiler_trainer.step.turns import Key, Mail, Turn, keys_of
from passes.ir import ir
from passes.pipeline.schedules import unit

Clock = Mapping[int, int]  # the number of turns taken by each pipeline rank, a vector clock
Ends = Mapping[Turn, Mapping[str, Key]]  # the values that turns read or produce, by name


class Message(NamedTuple):
    """A value that one pipeline rank sends to another; `number` counts the messages of the pair."""

    key: Key
    source: int
    to: int
    number: int


def messages(turns: Sequence[Turn], programs: Mapping[str, ir.Program]) -> Iterator[Message]:
    """Yield a step's messages in the order of their production: each value once to each rank that reads it."""
    reads, makes = keys_of(turns, programs)
    readers: dict[Key, dict[int, None]] = {}
    for turn in turns:
        for key in reads[turn].values():
            readers.setdefault(key, {})[turn.rank] = None
    numbers = Counter[tuple[int, int]]()
    for turn in turns:
        for key in makes[turn].values():
            for to in readers.get(key, ()):
                if to != turn.rank:
                    yield Message(key, turn.rank, to, numbers[turn.rank, to])
                    numbers[turn.rank, to] += 1


class Timetable:
    """The transfers of a pipeline rank, by the number of its turn.

    `receives` are posted before a turn. The sends in `arrived` are known to be received once a turn has its inputs.
    """

    def __init__(self, turns: Sequence[Turn], programs: Mapping[str, ir.Program], rank: int):
        reads, makes = keys_of(turns, programs)
        clocks, order = clocks_of(turns, reads, makes), order_of(turns, reads, makes)
        maker = {key: turn for turn in turns for key in makes[turn].values()}
        reader: dict[tuple[Key, int], Turn] = {}
        for turn in turns:
            for key in reads[turn].values():
                reader.setdefault((key, turn.rank), turn)
        own_turns = [turn for turn in turns if turn.rank == rank]
        self.number = {turn: number for number, turn in enumerate(own_turns)}
        self.receives: dict[int, list[Message]] = defaultdict(list)
        self.arrived: dict[int, list[Message]] = defaultdict(list)
        self.sends: dict[Key, list[Message]] = defaultdict(list)
        for message in messages(turns, programs):
            if message.to == rank:
                maker_place = order[maker[message.key]]
                self.receives[next(n for n, turn in enumerate(own_turns) if order[turn] > maker_place)].append(message)
            elif message.source == rank:
                self.sends[message.key].append(message)
                arrival = clocks[reader[message.key, message.to]][message.to]
                proofs = (n for n, turn in enumerate(own_turns) if clocks[turn].get(message.to, 0) >= arrival)
                if (proof := next(proofs, None)) is not None:
                    self.arrived[proof].append(message)


def order_of(turns: Sequence[Turn], reads: Ends, makes: Ends) -> dict[Turn, int]:
    """Return the position of each turn in the order of end times if nothing is late; its inputs come before it."""
    free: dict[int, float] = {}
    made_at: dict[Key, float] = {}
    ends: dict[Turn, float] = {}
    for turn in turns:
        start = max([free.get(turn.rank, 0.0), *(made_at[key] for key in reads[turn].values())])
        ends[turn] = free[turn.rank] = start + (unit(turn.task) if turn.task else 1.0)
        made_at |= dict.fromkeys(makes[turn].values(), ends[turn])
    return {turn: place for place, turn in enumerate(sorted(turns, key=ends.__getitem__))}


def clocks_of(turns: Sequence[Turn], reads: Ends, makes: Ends) -> dict[Turn, Clock]:
    """Return, for each turn, the turns of each rank that have been taken when it is done, itself included."""
    latest: dict[int, Clock] = {}
    maker_clocks: dict[Key, Clock] = {}
    clocks: dict[Turn, Clock] = {}
    for turn in turns:
        clock = Counter(latest.get(turn.rank, {}))
        for key in reads[turn].values():
            clock |= Counter(maker_clocks[key])
        clock[turn.rank] += 1
        clocks[turn] = latest[turn.rank] = clock
        maker_clocks |= dict.fromkeys(makes[turn].values(), clock)
    return clocks


class Ways(NamedTuple):
    """The process groups of messages to later pipeline ranks (`up`) and to earlier ones (`down`).

    NCCL runs the messages between two ranks of one group one after another; with two groups, both directions overlap.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    def group(self, source: int, to: int) -> dist.ProcessGroup:
        """Return the group of a message from one pipeline rank to another."""
        return self.up if source < to else self.down


class Post(Mail):
    """Sends and receives the messages of one process by its timetable.

    `rank` is its global rank, `stage` its pipeline rank. `ranks_per_stage` is the distance of neighbouring stages in
    global ranks.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        programs: Mapping[str, ir.Program],
        rank: int,
        stage: int,
        ranks_per_stage: int,
        device: torch.device,
        ways: Ways,
    ):
        self.rank, self.stage, self.ranks_per_stage, self.device, self.ways = rank, stage, ranks_per_stage, device, ways
        self.table = Timetable(turns, programs, stage)
        self.like = {
            carried_input.name: ir.example(node)
            for name in {turn.program for turn in turns if turn.rank == stage}
            for node, carried_input in zip(programs[name].placeholders(), programs[name].inputs, strict=True)
            if carried_input.kind == "carried"
        }
        self.sends_in_flight: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.receive_buffers: dict[Key, tuple[dist.Work | None, Tensor]] = {}
        self.outgoing: list[tuple[Message, Tensor]] = []
        self.next_buffers: list[tuple[Message, Tensor]] = []
        self.greet({(message.source, message.to) for message in messages(turns, programs)})

    def greet(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of pipeline ranks, in the same order on all ranks.

        NCCL connects at the first use and waits for the other rank, which might wait for a third.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for source, to in sorted(pairs):
            if self.stage == source:
                dist.send(byte, self.peer(to), self.ways.group(source, to))
            elif self.stage == to:
                dist.recv(byte, self.peer(source), self.ways.group(source, to))

    def begin(self) -> None:
        """Begin a step: forget the transfers of a failed one, and post the first receives."""
        self.sends_in_flight.clear()
        self.receive_buffers.clear()
        self.outgoing.clear()
        self.expect(self.buffers(0))

    def peer(self, stage: int) -> int:
        """Return the global rank of this rank's counterpart in another stage."""
        return self.rank + (stage - self.stage) * self.ranks_per_stage

    def start(self, turn: Turn) -> None:
        """Begin a turn: allocate the buffers of the receives that are posted at its end."""
        self.next_buffers = self.buffers(self.table.number[turn] + 1)

    def buffers(self, number: int) -> list[tuple[Message, Tensor]]:
        """Allocate memory for the receives that are posted before turn `number`."""
        due = [(message, self.like[message.key[0]]) for message in self.table.receives[number]]
        return [(m, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)) for m, x in due]

    def expect(self, buffers: Iterable[tuple[Message, Tensor]]) -> None:
        """Post receives."""
        for message, value in buffers:
            way = self.ways.group(message.source, self.stage)
            self.receive_buffers[message.key] = (
                dist.irecv(as_bytes(value), self.peer(message.source), way, message.number),
                value,
            )

    def receive(self, key: Key) -> Tensor:
        """Return a value of another stage once it has arrived; on a GPU, in stream order."""
        work, value = self.receive_buffers.pop(key)
        if work is not None:
            work.wait()
        return value

    def send(self, key: Key, values: Mapping[int, Tensor]) -> None:
        """Queue a value for the end of the turn, to the ranks that read it."""
        self.outgoing += [(message, as_bytes(values[self.rank])) for message in self.table.sends.get(key, ())]

    def done(self, turn: Turn) -> None:
        """End a turn: send its values, post receives, and free sent tensors that have arrived.

        Nothing may wait for the device between the sends and the receives, because another rank might do the same.
        """
        for message, value in self.outgoing:
            way = self.ways.group(self.stage, message.to)
            self.sends_in_flight[message] = dist.isend(value, self.peer(message.to), way, message.number), value
        self.outgoing.clear()
        self.expect(self.next_buffers)
        for message in self.table.arrived[self.table.number[turn]]:
            self.free(message)

    def end(self) -> None:
        """Wait for all sends; on a GPU, in stream order."""
        for message in list(self.sends_in_flight):
            self.free(message)

    def free(self, message: Message) -> None:
        """Wait for a send and free its tensor."""
        work, _ = self.sends_in_flight[message]
        if work is not None:
            work.wait()
        del self.sends_in_flight[message]


def as_bytes(value: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps, uint8, in memory order."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    assert span == value.numel(), f"a carried value has gaps: {tuple(value.shape)} {value.stride()}"
    return torch.as_strided(value, (span,), (1,)).view(torch.uint8)
