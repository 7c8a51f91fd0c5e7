"""What is recorded of a step by which names, and how much time spans cover."""

from __future__ import annotations

from collections.abc import Iterable

STEP, DATA = "step ", "data"  # a step, with its number; the wait for a batch
WAITS = ("_c10d_functional::wait_tensor", "ct::arrive")  # for collectives

Span = tuple[float, float]


def covered(spans: Iterable[Span]) -> float:
    """How much time lies in at least one of some spans."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total
