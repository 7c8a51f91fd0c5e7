"""Rates by size: what a kernel or a collective reaches depends on how large it is.

A curve is a few measured points. Between two of them both the size and the figure are interpolated in their logarithms;
beyond the first and the last a rate stays as it is there, and a time grows with the size from the last point on.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Figures by size, both above 0, in order of size."""

    points: Points

    @staticmethod
    def flat(figure: float) -> Curve:
        """The same figure whatever the size."""
        return Curve(((1.0, figure),))

    def scaled(self, size: float = 1.0, figure: float = 1.0) -> Curve:
        """Sizes and figures in other units."""
        return Curve(tuple((x * size, y * figure) for x, y in self.points))

    @cached_property
    def logarithms(self) -> tuple[list[float], list[float]]:
        """Those of sizes and of figures."""
        return [math.log(x) for x, _ in self.points], [math.log(y) for _, y in self.points]

    def at(self, size: float) -> float:
        """The figure at a size."""
        return interpolated(self, size)

    def seconds(self, size: float) -> float:
        """The figure as a time: beyond the last point it grows as the size does."""
        return self.at(size) * max(1.0, size / self.points[-1][0])


@lru_cache(maxsize=1 << 14)  # layers alike have the same sizes
def interpolated(curve: Curve, size: float) -> float:
    """The figure of a curve at a size."""
    first, last = curve.points[0], curve.points[-1]
    if size <= first[0] or size >= last[0]:
        return first[1] if size <= first[0] else last[1]
    sizes, figures = curve.logarithms
    i = bisect.bisect_right(sizes, math.log(size))
    part = (math.log(size) - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return math.exp(figures[i - 1] + part * (figures[i] - figures[i - 1]))


@dataclass(frozen=True)
class Rates:
    """What the kernels of one GPU reach.

    FLOP/s: of products by their FLOPs, of grouped ones by the FLOPs of a group, of attention by the length of keys.
    Bytes/s: of what memory moves, by the bytes that a kernel moves. `kernel_s` is the least that a kernel takes, and is
    added to those that only move memory; `launch_s` is what the host takes to launch one, `operator_s`
    what it takes for an operator that is interpreted; where `host_computes` it does neither meanwhile.
    """

    products: dict[torch.dtype, Curve]
    grouped: Curve
    attention: Curve
    attention_backward: Curve
    memory: Curve
    kernel_s: float = 0.0
    launch_s: float = 0.0
    operator_s: float = 0.0
    host_computes: bool = False

    __hash__ = None  # type: ignore[assignment]
