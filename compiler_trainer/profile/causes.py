"""Causes of a slow step that no prediction covers: data, a straggling rank, a machine unlike its cluster."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compiler_trainer.config.schema import Config
from compiler_trainer.profile.changes import computing
from compiler_trainer.training.measured import Spent
from compiler_trainer.training.pace import SLOW

WAITING = 0.05  # share of a step from which on the wait for data is reported
FAR = 1.5  # times the predicted computing time
OF_DATA = "tokenize ahead, put data.cache on a local disk; of a dataset of your own look at __getitem__"
OF_RANK = "look for a hot device, another process, a slow link there"
OF_RATES = "measure this machine by compiler-trainer calibrate; else look at clocks and other processes"


@dataclass(frozen=True)
class Cause:
    """A cause: a line on the problem, the most that a fix may save of a step, and the fix."""

    what: str
    saves_ms: float
    fix: str


@dataclass(frozen=True)
class OfRank:
    """The measurements of a rank, and its host."""

    rank: int
    host: str
    spent: Spent

    @property
    def busy_ms(self) -> float:
        """The time of a step without waiting for other ranks."""
        return self.spent.step_ms - sum(self.spent.exposed_ms.values())


def read(measured: Sequence[dict[str, Any]]) -> list[OfRank]:
    """Return the ranks of `measured.json`."""
    return [OfRank(each.pop("rank"), each.pop("host"), Spent(**each)) for each in map(dict, measured)]


def causes(cfg: Config, ranks: Sequence[OfRank], expected: Spent) -> list[Cause]:
    """Return the causes, the most expensive first."""
    found = (*data(ranks), *straggler(ranks), *unlike(cfg, ranks, expected))
    return sorted(found, key=lambda cause: -cause.saves_ms)


def data(ranks: Sequence[OfRank]) -> Iterator[Cause]:
    """Yield the cause that a rank waits for its batch."""
    worst = max(ranks, key=lambda each: each.spent.data_ms)
    ms, step_ms = worst.spent.data_ms, worst.spent.step_ms
    if ms > WAITING * step_ms:
        yield Cause(f"rank {worst.rank} waits {ms:,.1f} ms for data, {ms / step_ms:.0%} of a step", ms, OF_DATA)


def straggler(ranks: Sequence[OfRank]) -> Iterator[Cause]:
    """Yield the cause that one rank delays the others, with the part that takes longer there."""
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
    """Yield the cause that computing takes longer than its cluster's rates predict."""
    real, should = statistics.median(computing(each.spent) for each in ranks), computing(expected)
    if real > FAR * should > 0:
        yield Cause(f"computing takes {real / should:.1f} times what {cfg.cluster.name} is predicted to", 0.0, OF_RATES)


def parts(spent: Spent) -> dict[str, float]:
    """Return the milliseconds of a rank's work, without waiting for others."""
    return {**spent.kinds, "host": spent.host_ms, "data": spent.data_ms}
