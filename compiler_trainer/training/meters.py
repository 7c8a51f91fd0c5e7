"""Measure steps: results, times, memory, and now and then how ranks wait for each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch.autograd.profiler import record_function

from compiler_trainer.config.schema import Config
from compiler_trainer.data.loader import Loader, LoaderState
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.results import Moment, Results
from compiler_trainer.step.step import Step
from compiler_trainer.training.load import unevenness
from compiler_trainer.training.memory import PeakMemory
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.pace import Pace
from compiler_trainer.training.spans import DATA
from compiler_trainer.training.speed import speed


@dataclass
class Launched:
    """A step that was launched, and the measurements that need no result of it.

    `began` is when its batch was asked for and the device was done with the step before; the host waited `waited`
    seconds for the batch. `tokens` are those of the batch that are no padding, `data` is where the loader stands then.
    """

    number: int
    lr: float
    began: Moment
    waited: float
    results: Results
    loads: Results  # of routers
    data: LoaderState
    tokens: int
    measured: Record = field(default_factory=dict)


class Meters:
    """Measures the steps of a run."""

    def __init__(self, cfg: Config, trained: Subject, step: Step):
        self.cfg, self.step = cfg, step
        self.flops = trained.flops_per_token(cfg.train.seq_len)
        self.memory = PeakMemory(step.device, (t for state in step.state.values() for t in state.local.values()))
        self.pace = Pace(cfg, step.device.type == "cuda")

    def launch(self, number: int, loader: Loader, lr: float) -> Launched:
        """Launch step `number` on the next batch."""

        def begin() -> Launched:
            began, asked = Moment(self.step.device), time.perf_counter()
            with record_function(DATA):
                batch = loader.next()
            waited = time.perf_counter() - asked
            results = self.step.launch(batch, lr)
            rank = self.step.ranks[0]
            buffers = {name: state.local[rank] for name, state in self.step.state.items() if rank in state.local}
            loads = Results(unevenness(buffers), self.step.device)
            return Launched(number, lr, began, waited, results, loads, loader.state_dict(), loader.filled)

        launched, pace = self.pace.during(number, lambda: self.memory.during(begin), lambda step: step.results.read())
        launched.measured = {**self.step.balance(), "peak_mem_bytes": self.memory.bytes, **pace}
        return launched

    def read(self, launched: Launched) -> Record:
        """Return what was measured of a step, once the device has taken it."""
        result = {**launched.results.read(), **launched.loads.read(), "lr": launched.lr}
        seconds = launched.began.until(launched.results.end)
        times = {**speed(self.cfg, self.flops, launched.tokens, seconds), "data_ms": 1e3 * launched.waited}
        return {**result, **times, **launched.measured}
