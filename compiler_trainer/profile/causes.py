"""What makes a step slow that no prediction knows: data, a rank that others wait for, a machine unlike its cluster."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compiler_trainer.config.schema import Config
from compiler_trainer.profile.changes import computing
from compiler_trainer.training.measured import Spent
from compiler_trainer.training.pace import SLOW

WAITING = 0.05  # of a step, from which on the wait for data is worth a word
FAR = 1.5  # times what is predicted
OF_DATA = "tokenize ahead, put data.cache on a local disk; of a dataset of your own look at __getitem__"
OF_RANK = "look for a hot device, another process, a slow link there"
OF_RATES = "measure this machine by compiler-trainer calibrate; else look at clocks and other processes"


@dataclass(frozen=True)
class Cause:
    """A line on what is slow, what it may save of a step at most, and what to do."""

    what: str
    saves_ms: float
    fix: str


@dataclass(frozen=True)
class OfRank:
    """What a rank measured, and on which host."""

    rank: int
    host: str
    spent: Spent

    @property
    def busy_ms(self) -> float:
        """How long it did not wait for others."""
        return self.spent.step_ms - sum(self.spent.exposed_ms.values())


def read(measured: Sequence[dict[str, Any]]) -> list[OfRank]:
    """The ranks of `measured.json`."""
    return [OfRank(each.pop("rank"), each.pop("host"), Spent(**each)) for each in map(dict, measured)]


def causes(cfg: Config, ranks: Sequence[OfRank], expected: Spent) -> list[Cause]:
    """Them, that which costs most first."""
    found = (*data(ranks), *straggler(ranks), *unlike(cfg, ranks, expected))
    return sorted(found, key=lambda cause: -cause.saves_ms)


def data(ranks: Sequence[OfRank]) -> Iterator[Cause]:
    """That a rank waits for its batch."""
    worst = max(ranks, key=lambda each: each.spent.data_ms)
    ms, step_ms = worst.spent.data_ms, worst.spent.step_ms
    if ms > WAITING * step_ms:
        yield Cause(f"rank {worst.rank} waits {ms:,.1f} ms for data, {ms / step_ms:.0%} of a step", ms, OF_DATA)


def straggler(ranks: Sequence[OfRank]) -> Iterator[Cause]:
    """That one rank makes the others wait, and in what it takes longer."""
    usual = sorted(ranks, key=lambda each: each.busy_ms)[(len(ranks) - 1) // 2]
    slowest = max(ranks, key=lambda each: each.busy_ms)
    more = slowest.busy_ms - usual.busy_ms
    if slowest.busy_ms <= SLOW * usual.busy_ms or slowest.spent.data_ms - usual.spent.data_ms > more / 2:  # of data
        return
    here, there = parts(slowest.spent), parts(usual.spent)
    most = max(here, key=lambda part: here[part] - there.get(part, 0.0))
    longer = f"{here[most]:,.1f} ms of it {most}, where the other has {there.get(most, 0.0):,.1f}"
    works = f"works {slowest.busy_ms:,.1f} ms, the median rank {usual.busy_ms:,.1f}"
    yield Cause(f"rank {slowest.rank} ({slowest.host}) {works}; {longer}", more, OF_RANK)


def unlike(cfg: Config, ranks: Sequence[OfRank], expected: Spent) -> Iterator[Cause]:
    """That computing takes longer than its cluster lets expect."""
    real, should = statistics.median(computing(each.spent) for each in ranks), computing(expected)
    if real > FAR * should > 0:
        yield Cause(f"computing takes {real / should:.1f} times what {cfg.cluster.name} is predicted to", 0.0, OF_RATES)


def parts(spent: Spent) -> dict[str, float]:
    """What a rank does beside waiting for others."""
    return {**spent.kinds, "host": spent.host_ms, "data": spent.data_ms}
