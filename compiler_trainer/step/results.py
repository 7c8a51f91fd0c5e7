"""Numbers that a device computes, read by the host as late as possible, and when the device got there."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor


class Moment:
    """A moment in the work of a device: when it has done all that was launched before."""

    def __init__(self, device: torch.device):
        self.at = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Wait until the device is there."""
        if self.event is not None:
            self.event.synchronize()

    def until(self, later: Moment) -> float:
        """Return the seconds from this moment to a later one that was waited for."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event) / 1e3
        return later.at - self.at


class Results:
    """Named numbers on their way from the device to the host, which goes on meanwhile.

    `numbers` are fp64[] each, on the device. They arrive when all that was launched before is done; `end` is when.
    """

    def __init__(self, numbers: Mapping[str, Tensor], device: torch.device):
        self.numbers = dict(numbers)
        self.row = torch.stack([*numbers.values()]) if numbers else torch.empty(0, dtype=torch.float64)
        self.row = self.row.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
        self.end = Moment(device)

    def read(self) -> dict[str, float]:
        """Return the numbers, once the device has computed them; the host waits for it here and nowhere else."""
        self.end.wait()
        return dict(zip(self.numbers, self.row.tolist(), strict=True))
