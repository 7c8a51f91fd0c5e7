"""Names of a step's profiler events, and the time that spans cover."""

from __future__ import annotations

from collections.abc import Iterable

STEP, DATA = "step ", "data"  # a step, with its number; the wait for a batch
WAITS = ("_c10d_functional::wait_tensor", "ct::arrive")  # for collectives

Span = tuple[float, float]


def covered_time(spans: Iterable[Span]) -> float:
    """Return the time that at least one of some spans covers."""
    total, end = 0.0, float("-inf")
    for begin, span_end in sorted(spans):
        total += max(0.0, span_end - max(begin, end))
        end = max(end, span_end)
    return total
