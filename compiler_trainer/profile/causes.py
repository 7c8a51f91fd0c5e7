"""Causes of a slow step that no prediction covers: data, a straggling rank, a machine unlike its cluster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compiler_trainer.config.schema import Config
from compiler_trainer.profile.changes import computing
from compiler_trainer.training.anomalies import SLOW
from compiler_trainer.training.trace import Spent

WAITING = 0.05  # share of a step from which on the wait for data is reported
FAR = 1.5  # times the predicted computing time
OF_DATA = "tokenize ahead, put data.cache on a local disk; of a dataset of your own look at __getitem__"
OF_RANK = "look for a hot device, another process, a slow link there"
OF_STAGES = "give that rank fewer layers by passes.pipeline.stages"
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
    count = len(ranks) // cfg.mesh.pp  # of ranks in a stage; stages are equal blocks of ranks
    stages = [ranks[i : i + count] for i in range(0, len(ranks), count)]
    stragglers = itertools.chain.from_iterable(map(straggler, stages))
    all_causes = (*data(ranks), *stragglers, *uneven(stages), *unlike(cfg, ranks, expected))
    return sorted(all_causes, key=lambda cause: -cause.saves_ms)


def data(ranks: Sequence[OfRank]) -> Iterator[Cause]:
    """Yield the cause that a rank waits for its batch."""
    worst = max(ranks, key=lambda of_rank: of_rank.spent.data_ms)
    ms, step_ms = worst.spent.data_ms, worst.spent.step_ms
    if ms > WAITING * step_ms:
        yield Cause(f"rank {worst.rank} waits {ms:,.1f} ms for data, {ms / step_ms:.0%} of a step", ms, OF_DATA)


def median_rank(ranks: Sequence[OfRank]) -> OfRank:
    """Return the rank whose work takes as long as for most."""
    return sorted(ranks, key=lambda each: each.busy_ms)[(len(ranks) - 1) // 2]


def uneven(stages: Sequence[Sequence[OfRank]]) -> Iterator[Cause]:
    """Yield the cause that the ranks of one pipeline stage have more to do than those of others."""
    works = [median_rank(ranks).busy_ms for ranks in stages]
    longest, median = max(works), statistics.median_low(works)
    if longest > SLOW * median:
        line = f"pipeline rank {works.index(longest)} works {longest:,.1f} ms, the median one {median:,.1f}"
        yield Cause(line, longest - median, OF_STAGES)


def straggler(ranks: Sequence[OfRank]) -> Iterator[Cause]:
    """Yield the cause that one rank of a stage delays the others, with the part that takes longer there."""
    median = median_rank(ranks)
    slowest = max(ranks, key=lambda each: each.busy_ms)
    extra_ms = slowest.busy_ms - median.busy_ms
    if slowest.busy_ms <= SLOW * median.busy_ms or slowest.spent.data_ms - median.spent.data_ms > extra_ms / 2:
        return  # `data` reports it
    slow_parts, median_parts = parts(slowest.spent), parts(median.spent)
    part = max(slow_parts, key=lambda part: slow_parts[part] - median_parts.get(part, 0.0))
    longer = f"{slow_parts[part]:,.1f} ms of it {part}, where the other has {median_parts.get(part, 0.0):,.1f}"
    works = f"works {slowest.busy_ms:,.1f} ms, the median rank {median.busy_ms:,.1f}"
    yield Cause(f"rank {slowest.rank} ({slowest.host}) {works}; {longer}", extra_ms, OF_RANK)


def unlike(cfg: Config, ranks: Sequence[OfRank], expected: Spent) -> Iterator[Cause]:
    """Yield the cause that computing takes longer than its cluster's rates predict."""
    measured_ms, predicted_ms = statistics.median(computing(each.spent) for each in ranks), computing(expected)
    if measured_ms > FAR * predicted_ms > 0:
        yield Cause(
            f"computing takes {measured_ms / predicted_ms:.1f} times the prediction for {cfg.cluster.name}",
            0.0,
            OF_RATES,
        )


def parts(spent: Spent) -> dict[str, float]:
    """Return the milliseconds of a rank's work, without waiting for others."""
    return {**spent.kinds, "host": spent.host_ms, "data": spent.data_ms}
