"""The timeline of a step on one rank: kernels in order on its compute stream, collectives on one stream an axis.

A collective starts when all work issued before it is done and its axis is free. A wait blocks the compute stream until
its collective is done, and this time counts as exposed on that axis. The host launches one thing after another; nothing
starts before its launch. A host that is the device launches nothing while it computes or waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from passes.cost.clock import COMPUTE, Clock, Span
from passes.cost.cluster import Beside
from passes.cost.fusion import Kernel
from passes.ir.operators import axis_of


@dataclass(frozen=True)
class Cost:
    """The seconds of a kernel or collective alone; `is_moving` if memory limits it, not arithmetic."""

    seconds: float
    is_moving: bool = True


@dataclass(frozen=True)
class Timeline:
    """A step on one rank: its seconds, those of computing, and `slowed_s`, the part of these lost to collectives.

    `exposed_s` are the seconds that the rank waits for each axis, `launch_s` those in which nothing is launched.
    `spans` has the kernels and collectives by their last node, in order; a stream is `compute` or an axis.
    """

    step_s: float
    compute_s: float
    slowed_s: float
    exposed_s: Mapping[str, float]
    launch_s: float
    spans: Mapping[str, Span]


def play(
    kernels: Iterable[Kernel],
    cost: Callable[[Kernel], Cost],
    beside: Beside,
    launch_s: Callable[[Kernel], float],
    host_computes: bool = False,
) -> Timeline:
    """Run the kernels in the given order, each on its stream, and return the timeline."""
    clock, exposed = Clock(beside.sending), Counter[str]()
    computing = alone = launching = host_s = 0.0
    for kernel in kernels:
        if kernel.kind == "wait":
            span = next(clock.spans[k] for k in kernel.after if k.kind == "collective")
            exposed[str(span.stream)] += clock.wait(span.end)  # type: ignore[assignment]
            continue
        host_s = (clock.now() if host_computes else host_s) + launch_s(kernel)
        launching += clock.wait(host_s)
        cost_alone = cost(kernel)
        if kernel.kind == "collective":
            clock.run(kernel, axis_of(kernel.nodes[0]), cost_alone.seconds, after=clock.now())
        else:
            keeps = beside.moving if cost_alone.is_moving else beside.computing
            span = clock.run(kernel, COMPUTE, cost_alone.seconds, keeps=keeps)
            alone += cost_alone.seconds
            computing += span.end - span.start
    in_order = sorted(clock.spans.items(), key=lambda item: item[1][:2])
    spans = {kernel.nodes[-1].name: span for kernel, span in in_order}  # type: ignore[attr-defined]
    return Timeline(max(clock.free.values()), computing, computing - alone, dict(exposed), launching, spans)


def longest(timeline: Timeline, count: int) -> list[tuple[str, Span]]:
    """Return the kernels and collectives that take longest, the longest first."""
    return sorted(timeline.spans.items(), key=lambda item: item[1].start - item[1].end)[:count]
