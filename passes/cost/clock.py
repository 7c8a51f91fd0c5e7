"""The clock: start and end of each piece of work in a step, for nodes of a program and tasks of a pipeline alike.

    clock = Clock()
    clock.run("mm", COMPUTE, 3.0)                        # 0 to 3
    clock.run("gather", "tp", 2.0, after=clock.now())    # 3 to 5: each axis has a stream for its collectives
    clock.run("silu", COMPUTE, 1.0)                      # 3 to 4, during the gather
    clock.wait(clock.end("gather"))                      # 1.0: the compute stream does nothing until 5

A stream does one thing at a time, in the order of the calls. A kernel and the collectives that overlap it slow each
other down: the kernel `keeps` a share of its speed, the collectives the share `sending` of theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

COMPUTE = "compute"


class Span(NamedTuple):
    """The start and the end of a piece of work, and the stream that runs it."""

    start: float
    end: float
    stream: Hashable


@dataclass(frozen=True)
class Timing:
    """The span of each piece of work, in seconds or another unit of the durations."""

    spans: Mapping[Any, Span]

    @cached_property
    def length(self) -> float:
        """The end of the last piece of work."""
        return max(span.end for span in self.spans.values())

    @cached_property
    def busy(self) -> Mapping[Any, float]:
        """The time in which each stream runs something."""
        total: Counter[Hashable] = Counter()
        for start, end, stream in self.spans.values():
            total[stream] += end - start  # type: ignore[assignment]
        return total

    @property
    def idle(self) -> float:
        """The share of the time of all streams in which nothing runs."""
        return 1 - sum(self.busy.values()) / (len(self.busy) * self.length)

    def of(self, is_chosen: Callable[[Any], bool]) -> Timing:
        """Return the timing of some of the work."""
        return Timing({work: span for work, span in self.spans.items() if is_chosen(work)})


@dataclass
class Clock:
    """The spans of all work so far, and the time at which each stream is free."""

    sending: float = 1.0
    spans: dict[Hashable, Span] = field(default_factory=dict)
    free: dict[Hashable, float] = field(default_factory=lambda: defaultdict(int))
    travelling: list[Hashable] = field(default_factory=list)  # collectives that may be under way

    def now(self, stream: Hashable = COMPUTE) -> float:
        """Return the time at which a stream is free."""
        return self.free[stream]

    def end(self, work: Hashable) -> float:
        """Return the end of a piece of work."""
        return self.spans[work].end

    def wait(self, moment: float, stream: Hashable = COMPUTE) -> float:
        """Block a stream until a moment; return the time that it waits."""
        before = self.free[stream]
        self.free[stream] = max(before, moment)
        return self.free[stream] - before

    def run(self, work: Hashable, stream: Hashable, duration: float, after: float = 0, keeps: float = 1.0) -> Span:
        """Run a piece of work as soon as its stream is free, but not before the moment `after`."""
        start = max(self.free[stream], after)
        end = start + duration
        if stream != COMPUTE:
            self.travelling.append(work)
        elif keeps < 1.0 or self.sending < 1.0:
            end += lost(duration, keeps, (max(self.free.values()) - start) / self.sending)
            self.delay_collectives(start, end)
        self.spans[work] = span = Span(start, end, stream)
        self.free[stream] = end
        return span

    def delay_collectives(self, start: float, end: float) -> None:
        """Delay the collectives that run or queue during a kernel by the time that it slows them down."""

        def delayed(moment: float) -> float:
            return moment + lost(moment - start, self.sending, end - start)

        self.travelling = [work for work in self.travelling if self.spans[work].end > start]
        for work in self.travelling:
            begin, until, stream = self.spans[work]
            self.spans[work] = Span(delayed(begin), delayed(until), stream)
        self.free.update({stream: delayed(moment) for stream, moment in self.free.items() if stream != COMPUTE})


def lost(duration: float, share: float, meanwhile: float) -> float:
    """Return the time lost by work that runs at a share of its speed during the first `meanwhile`."""
    return max(0.0, min(duration / share - duration, meanwhile * (1 - share)))
