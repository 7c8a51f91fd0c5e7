"""The turns of a step on paper: when each begins and ends, and what lies beside it in its rank's memory.

    1f1b, 2 ranks      rank 0  F0 0  F0 1  ....  B0 0  ....  B0 1  U0
                       rank 1  ....  F1 0  B1 0  F1 1  B1 1  U1
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compiler_trainer.step.messages import Message, messages
from compiler_trainer.step.turns import Key, Turn, keys_of
from passes.program import ir


@dataclass(frozen=True)
class Played:
    """When each turn begins and ends, in seconds."""

    spans: Mapping[Turn, tuple[float, float]]

    @property
    def step_s(self) -> float:
        """Until the last rank is done."""
        return max(end for _, end in self.spans.values())

    def busy_s(self, rank: int) -> float:
        """How long a pipeline rank has something to do."""
        return sum(end - start for turn, (start, end) in self.spans.items() if turn.rank == rank)

    def idle(self) -> float:
        """The share of all ranks' time in which nothing runs, until the last microbatch is done."""
        of_table = {turn: span for turn, span in self.spans.items() if turn.microbatch is not None}
        busy, ranks = sum(end - start for start, end in of_table.values()), len({turn.rank for turn in of_table})
        return 1 - busy / (ranks * Played(of_table).step_s)


def play(
    turns: Sequence[Turn],
    programs: Mapping[str, ir.Program],
    seconds: Mapping[str, float],
    send_s: Callable[[Message], float],
) -> Played:
    """Let each turn begin when its rank is free and what it reads is there; messages of a pair follow each other."""
    free, sending, there = Counter[int](), Counter[tuple[int, int]](), dict[tuple[Key, int], float]()
    reads, makes = keys_of(turns, programs)
    sent, spans = defaultdict[Key, list[Message]](list), dict[Turn, tuple[float, float]]()
    for message in messages(turns, programs):
        sent[message.key].append(message)
    for turn in turns:
        start = max([free[turn.rank], *(there[key, turn.rank] for key in reads[turn].values())])
        end = start + seconds[turn.program]
        spans[turn], free[turn.rank] = (start, end), end  # type: ignore[assignment]
        for key in makes[turn].values():
            there[key, turn.rank] = end
            for message in sent[key]:
                pair = message.source, message.to
                sending[pair] = max(end, sending[pair]) + send_s(message)  # type: ignore[assignment]
                there[key, message.to] = sending[pair]
    return Played(spans)


def kept_beside(
    turns: Sequence[Turn], programs: Mapping[str, ir.Program], rank: int, size: Mapping[str, int]
) -> Iterator[tuple[Turn, int]]:
    """Each turn of a rank with the bytes that are kept for later ones while it runs; `size` is that of a value."""
    reads, makes = keys_of(turns, programs)
    turns = [turn for turn in turns if turn.rank == rank]
    left = Counter(key for turn in turns for key in reads[turn].values())
    kept = dict[Key, int]()
    for turn in turns:
        own = list(reads[turn].values())
        yield turn, sum(kept.values()) - sum(kept.get(key, 0) for key in own)
        left.subtract(own)
        kept |= {key: size[key[0]] for key in (*own, *makes[turn].values()) if left[key]}
        for key in own:
            if not left[key]:
                kept.pop(key, None)
