"""Numbers that a device computes, read by the host as late as possible."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor


class Results:
    """Named numbers on their way from the device to the host, which goes on meanwhile.

    `numbers` are fp64[] each, on the device. The copy waits for what was launched before it, and for nothing later.
    """

    def __init__(self, numbers: Mapping[str, Tensor]):
        self.numbers = dict(numbers)
        self.on_host: dict[str, float] | None = None
        self.read_at = 0.0  # of time.perf_counter
        if numbers:
            row = torch.stack([*numbers.values()])
            self.row = row.to("cpu", non_blocking=True)  # from a GPU, into pinned memory
            self.copied = torch.cuda.Event() if row.is_cuda else None
            if self.copied is not None:
                self.copied.record()

    def read(self) -> dict[str, float]:
        """Return the numbers, once the device has computed them; the host waits for it here and nowhere else."""
        if self.on_host is None:
            self.on_host = {}
            if self.numbers:
                if self.copied is not None:
                    self.copied.synchronize()
                self.on_host = dict(zip(self.numbers, self.row.tolist(), strict=True))
            self.read_at = time.perf_counter()
        return dict(self.on_host)
