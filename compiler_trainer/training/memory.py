"""How much memory a step takes, measured."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile  # that of torch.profiler imports the compiler

T = TypeVar("T")


class PeakMemory:
    """The peak of live tensor bytes in a step of this process, `bytes` once one was measured.

    On CUDA it is the allocator's own peak, taken anew each step. The CPU allocator keeps no count, but reports each
    allocation and release to the profiler: from these the peak is exact, and as a compiled step allocates the same
    every time, one step is profiled and the others go at full speed. What was there before the step and stays (`state`)
    is added on the CPU; scratch space inside kernels is no tensor and not in either figure.
    """

    def __init__(self, device: torch.device, state: Iterable[Tensor]):
        self.device = device
        self.state_bytes = sum(tensor.nbytes for tensor in state)
        self.bytes = 0

    def during(self, run: Callable[[], T]) -> T:
        """The result of `run`, which is measured."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            result = run()
            self.bytes = torch.cuda.max_memory_allocated(self.device)
            return result
        if self.bytes:
            return run()
        result, peak = cpu_peak(run)
        self.bytes = self.state_bytes + peak if peak else 0  # then the next step is measured
        return result


def cpu_peak(run: Callable[[], T]) -> tuple[T, int]:
    """The result of `run`, and the most bytes of CPU tensors alive at once that were allocated in it.

    They are counted from a file, and are 0 where a full disk did not take it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below it, the profiler announces itself on stderr
    with profile(profile_memory=True) as profiler:
        result = run()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            return result, highest(json.loads(trace.read_text())["traceEvents"])
    except (OSError, ValueError):  # not there, or cut
        return result, 0


def highest(events: Iterable[dict]) -> int:
    """The highest sum of the sizes in a trace's memory events of the CPU; a release has a negative size."""
    live = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        if event["args"]["Device Type"] == 0:
            live += event["args"]["Bytes"]
            peak = max(peak, live)
    return peak
