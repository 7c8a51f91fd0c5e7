"""Numbers that a device computes and the host reads as late as possible, with the time of their completion."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from compiler_trainer.step.ranks import waiting_for_device


class Moment:
    """A point in a device's work: the completion of everything launched before it."""

    def __init__(self, device: torch.device):
        self.host_time = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Wait until the device reaches it; raise RunError if collectives before it were aborted."""
        if self.event is not None:
            with waiting_for_device():
                self.event.synchronize()

    def until(self, later: Moment) -> float:
        """Return the seconds from this moment to a later one; both must have been reached."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event) / 1e3
        return later.host_time - self.host_time


class Results:
    """Named numbers that are copied from the device to the host asynchronously.

    `numbers` are fp64[] each, on the device. They arrive at the moment `end`, when everything launched before is done.
    """

    def __init__(self, numbers: Mapping[str, Tensor], device: torch.device):
        self.numbers = dict(numbers)
        self.row = torch.stack([*numbers.values()]) if numbers else torch.empty(0, dtype=torch.float64)
        self.row = self.row.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
        self.end = Moment(device)

    def read(self) -> dict[str, float]:
        """Wait for the device, and return the numbers; the host waits here and nowhere else."""
        self.end.wait()
        return dict(zip(self.numbers, self.row.tolist(), strict=True))
