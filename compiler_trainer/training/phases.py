"""Times of the phases before the first step."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler_trainer import BEGAN

runs = itertools.count()  # runs of this process, such as the points of a sweep


@dataclass
class Phases:
    """Seconds of each phase before the first step, in order; a process's first run counts from the package's import."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=lambda: time.perf_counter() if next(runs) else BEGAN)

    def end(self, name: str) -> float:
        """End a phase that lasted since the previous one ended, and return its seconds."""
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now
        return self.seconds[name]

    def end_compiling(self, seconds: Mapping[str, float]) -> None:
        """Split the compile time into its stages' seconds; the remainder goes to weights."""
        kernels = sum(s for name, s in seconds.items() if name.endswith(".lower"))
        capture = seconds.get("capture", 0.0)
        programs = sum(seconds.values()) - kernels - capture
        weights = max(0.0, self.end("weights") - sum(seconds.values()))
        self.seconds |= {"capture": capture, "program": programs, "kernels": kernels, "weights": weights}

    def report(self) -> dict[str, Any]:
        """Return seconds by phase, and the CPU seconds of all cores, with those of compiler processes."""
        seconds = {name: round(s, 4) for name, s in self.seconds.items()}
        return {"start": seconds, "start_cpu_s": round(sum(os.times()[:4]), 2)}

    def __str__(self) -> str:
        """Return a line such as `6.1 s: import 2.9, program 0.4, kernels 0.8`, without phases that took no time."""
        parts = (f"{name} {s:.1f}" for name, s in self.seconds.items() if s >= 0.05)
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
