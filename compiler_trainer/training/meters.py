"""What is measured of a step beside its results: times, memory, and now and then how ranks wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from compiler_trainer.config.schema import Config
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.step import Step
from compiler_trainer.training.memory import PeakMemory
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.pace import Pace
from compiler_trainer.training.speed import speed

Batch = dict[str, Tensor]


class Meters:
    """Measures the steps of a run."""

    def __init__(self, cfg: Config, trained: Subject, step: Step):
        self.cfg, self.step = cfg, step
        self.flops = trained.flops_per_token(cfg.train.seq_len)
        self.memory = PeakMemory(step.device, (t for state in step.state.values() for t in state.local.values()))
        self.pace = Pace(cfg, step.device.type == "cuda")

    def take(self, number: int, fetch: Callable[[], tuple[Batch, int]], lr: float) -> tuple[Record, Record]:
        """Take step `number`: the step's results, and what was measured of it.

        `fetch` gives the batch and how many of its tokens are no padding, which alone count.
        """

        def timed() -> tuple[int, Record, float, float]:
            began = time.perf_counter()
            batch, tokens = fetch()
            waited = time.perf_counter() - began
            return tokens, self.step(batch, lr), time.perf_counter() - began, waited

        (tokens, result, seconds, waited), pace = self.pace.during(number, lambda: self.memory.during(timed))
        times = {**speed(self.cfg, self.flops, tokens, seconds), "data_ms": 1e3 * waited}
        return result, {**times, "peak_mem_bytes": self.memory.bytes, **pace}
