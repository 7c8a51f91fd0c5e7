"""Find the rank that the others wait for: at intervals, ranks compare their working and waiting times of one step.

A collective ends on all ranks at the same time, so a slow rank makes all steps equally long on all ranks. Only the
working time before a collective differs. The profiler measures it: on a CPU as the time outside of waits for
collectives, on CUDA as the time in which kernels other than NCCL's run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from compiler_trainer.config.schema import Config
from compiler_trainer.step.ranks import gather, host_group
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.progress import announce
from compiler_trainer.training.spans import WAITS, covered_time

SLOW = 1.2  # times the median working time, from which on a rank is reported
RANKS = ("busy_ms_median", "busy_ms_max", "slowest_rank", "wait_share")  # names of the metrics
T = TypeVar("T")


class Pace:
    """The measurement of one step in every `run.pace_interval`, if there are several ranks."""

    def __init__(self, cfg: Config, on_cuda: bool):
        self.interval = cfg.run.pace_interval if dist.is_initialized() and dist.get_world_size() > 1 else None
        self.first = 10 if cfg.run.profile else 2  # run.profile uses the profiler in the first steps
        self.kind = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
        self.group = host_group() if self.interval else None
        self.steps_taken, self.suspect = 0, -1

    def during(self, number: int, launch: Callable[[], T], wait: Callable[[T], object]) -> tuple[T, Record]:
        """Launch step `number`; return it, with metrics of the ranks if it is measured, which waits for the step's end.

        Every rank must call this.
        """
        self.steps_taken += 1
        if not self.interval or number % self.interval or self.steps_taken < self.first:
            return launch(), {}
        with profile(activities=[self.kind], acc_events=True) as profiler:
            start_time = time.perf_counter()
            result = launch()
            wait(result)
            whole_ms = 1e3 * (time.perf_counter() - start_time)
        busy_ms = self.busy_ms(profiler.events(), whole_ms)
        times = gather((busy_ms, 1 - busy_ms / whole_ms), self.group)
        return result, self.compare(number, [b for b, _ in times], [w for _, w in times])

    def busy_ms(self, events: Iterable[FunctionEvent], whole_ms: float) -> float:
        """Return the milliseconds of a step in which this rank did not wait for others."""
        if self.kind is ProfilerActivity.CPU:
            return whole_ms - covered_ms(e for e in events if e.name in WAITS)
        kernels = (e for e in events if e.device_type == DeviceType.CUDA)
        return covered_ms(e for e in kernels if "nccl" not in e.name.lower())

    def compare(self, number: int, busy_ms: Sequence[float], wait_shares: Sequence[float]) -> Record:
        """Return metrics of all ranks' working times (ms) and shares of waiting; report a slow rank.

        A rank is reported only if it was the slow one in the previous measurement too, because one may be chance.
        """
        median, longest = statistics.median_low(busy_ms), max(busy_ms)
        slowest = busy_ms.index(longest)
        previous, self.suspect = self.suspect, slowest if longest > SLOW * median else -1
        if self.suspect >= 0 and self.suspect == previous:
            problem = f"rank {slowest} works {longest:,.0f} ms, the median rank {median:,.0f} ms"
            announce(f"step {number}: {problem}; the others wait for it")
        return dict(zip(RANKS, (median, longest, float(slowest), statistics.fmean(wait_shares))))


def covered_ms(events: Iterable[FunctionEvent]) -> float:
    """Return the milliseconds that at least one of some events covers."""
    return covered_time((event.time_range.start, event.time_range.end) for event in events) / 1e3
