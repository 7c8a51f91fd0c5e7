"""Rates by size: the speed of a kernel or a collective depends on its size.

A curve is a few measured points. Between two points, size and figure are interpolated in their logarithms. Beyond the
first and the last point a rate is constant; a time grows with the size beyond the last point.
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
        """Return a curve with the same figure for all sizes."""
        return Curve(((1.0, figure),))

    def scaled(self, size: float = 1.0, figure: float = 1.0) -> Curve:
        """Return the curve with sizes and figures in other units."""
        return Curve(tuple((x * size, y * figure) for x, y in self.points))

    @cached_property
    def logarithms(self) -> tuple[list[float], list[float]]:
        """The logarithms of the sizes and of the figures."""
        return [math.log(x) for x, _ in self.points], [math.log(y) for _, y in self.points]

    def at(self, size: float) -> float:
        """Return the figure at a size."""
        return interpolated(self, size)

    def seconds(self, size: float) -> float:
        """Return the figure as a time: beyond the last point it grows with the size."""
        return self.at(size) * max(1.0, size / self.points[-1][0])


@lru_cache(maxsize=1 << 14)  # similar layers have the same sizes
def interpolated(curve: Curve, size: float) -> float:
    """Return the figure of a curve at a size."""
    first, last = curve.points[0], curve.points[-1]
    if size <= first[0] or size >= last[0]:
        return first[1] if size <= first[0] else last[1]
    sizes, figures = curve.logarithms
    i = min(bisect.bisect_right(sizes, math.log(size)), len(sizes) - 1)  # logarithms are rounded
    part = (math.log(size) - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return math.exp(figures[i - 1] + part * (figures[i] - figures[i - 1]))


@dataclass(frozen=True)
class Rates:
    """The rates of the kernels of one GPU.

    FLOP/s: of matmuls by their FLOPs, of grouped matmuls by the FLOPs of a group, of attention by the number of keys.
    Bytes/s: of memory, by the bytes that a kernel moves. `kernel_s` is the least time of a kernel, and is added to
    kernels that only move memory. `launch_s` is the host's time to launch a kernel, `operator_s` its time for an
    interpreted operator; if `host_computes`, the host does neither while it computes.
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
