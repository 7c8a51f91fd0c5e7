"""The simulation of the turns of a step: when each begins and ends, and the other memory of its rank meanwhile.

1f1b, 2 ranks      rank 0  F0 0  F0 1  ....  B0 0  ....  B0 1  U0
                   rank 1  ....  F1 0  B1 0  F1 1  B1 1  U1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from compiler_trainer.step.messages import Message, Timetable, messages
from compiler_trainer.step.turns import Key, Turn, keys_of
from passes.cost.clock import Clock, Timing
from passes.ir import ir


def play(
    turns: Sequence[Turn],
    programs: Mapping[str, ir.Program],
    seconds: Mapping[str, float],
    send_s: Callable[[Message], float],
) -> Timing:
    """Time the turns, each rank a stream; a turn waits for its inputs, and messages between two ranks run in turn."""
    clock, arrival, (reads, makes) = Clock(), dict[tuple[Key, int], float](), keys_of(turns, programs)
    sent = defaultdict[Key, list[Message]](list)
    for message in messages(turns, programs):
        sent[message.key].append(message)
    for turn in turns:
        after = max((arrival[key, turn.rank] for key in reads[turn].values()), default=0.0)
        end = clock.run(turn, turn.rank, seconds[turn.program], after).end
        for key in makes[turn].values():
            arrival[key, turn.rank] = end
            for message in sent[key]:
                pair = message.source, message.to
                arrival[key, message.to] = clock.run(message, pair, send_s(message), end).end
    return Timing(clock.spans).of(lambda work: isinstance(work, Turn))


def kept_for_later(
    turns: Sequence[Turn], programs: Mapping[str, ir.Program], rank: int, value_bytes: Mapping[str, int]
) -> Iterator[tuple[Turn, int]]:
    """Yield each turn of a rank with the bytes kept for later turns while it runs; `size` has each value's bytes."""
    reads, makes = keys_of(turns, programs)
    turns = [turn for turn in turns if turn.rank == rank]
    reads_left = Counter(key for turn in turns for key in reads[turn].values())
    kept_bytes = dict[Key, int]()
    for turn in turns:
        inputs = list(reads[turn].values())
        yield turn, sum(kept_bytes.values()) - sum(kept_bytes.get(key, 0) for key in inputs)
        reads_left.subtract(inputs)
        kept_bytes |= {key: value_bytes[key[0]] for key in (*inputs, *makes[turn].values()) if reads_left[key]}
        for key in inputs:
            if not reads_left[key]:
                kept_bytes.pop(key, None)


class InFlight(NamedTuple):
    """Bytes of messages in a rank's memory: receive buffers, and sent tensors that no later turn reads."""

    receives: int
    sends: int


def in_flight(
    turns: Sequence[Turn], programs: Mapping[str, ir.Program], rank: int, value_bytes: Mapping[str, int]
) -> Iterator[tuple[Turn, InFlight]]:
    """Yield each turn of a rank with the bytes of messages that `Post` holds while it runs.

    A buffer is alive from the beginning of the turn before which its receive is posted until its first reader begins; a
    sent tensor until the end of the turn that proves its arrival. Values that the turn itself reads or makes, or that
    are kept for later turns, are not counted here.
    """
    if len({turn.rank for turn in turns}) == 1:
        yield from ((turn, InFlight(0, 0)) for turn in turns)
        return
    table, (reads, makes) = Timetable(turns, programs, rank), keys_of(turns, programs)
    turns = [turn for turn in turns if turn.rank == rank]
    readers = [(key, index) for index, turn in enumerate(turns) for key in reads[turn].values()]
    last, first = dict(readers), dict(reversed(readers))
    made_by_turn = {key: index for index, turn in enumerate(turns) for key in makes[turn].values()}
    posted = {message.key: index for index, due in table.receives.items() for message in due}
    proven = {message: index for index, arrived in table.arrived.items() for message in arrived}
    until = {key: max(proven.get(each, len(turns)) for each in sends) for key, sends in table.sends.items()}
    for index, turn in enumerate(turns):
        received = [key for key, before in posted.items() if before - 1 <= index < first[key]]
        sent = [key for key, end in until.items() if max(made_by_turn[key], last.get(key, 0)) < index <= end]
        yield turn, InFlight(*(sum(value_bytes[name] for name, _ in keys) for keys in (received, sent)))
