"""The steps of a run. On a GPU, each step is launched before the host reads the results of the previous one.

While the device computes step n, the host prepares batch n + 1, launches step n + 1, and only then waits for the
results of step n. Step n + 1 waits until step n is read if something uses the state after step n: a validation, a
checkpoint, a comparison of replicas, or a callback that defines `on_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from compiler_trainer.config.schema import Config
from compiler_trainer.data.datasets import Datasets
from compiler_trainer.data.loader import Loader, LoaderState
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.results import Moment, Results
from compiler_trainer.step.step import Step
from compiler_trainer.training import averages
from compiler_trainer.training.anomalies import Judge, Lost, Pace, Spikes
from compiler_trainer.training.evaluate import means, validation_batches
from compiler_trainer.training.loggers import announce
from compiler_trainer.training.lr_schedule import rates
from compiler_trainer.training.metrics import Record, of_routers, unevenness
from compiler_trainer.training.prepare import Start
from compiler_trainer.training.speed import PeakMemory, speed
from compiler_trainer.training.trace import DATA, Trace

ASYNCHRONOUS = ("cuda",)  # device types that compute asynchronously to the host


@dataclass
class Launched:
    """A step that was launched, with the measurements that do not need its results.

    `began` is the moment when its batch was requested and the device had finished the previous step; the host waited
    `wait_s` seconds for the batch. `tokens` counts the batch's tokens without padding; `data` is the loader's state
    after this batch.
    """

    number: int
    lr: float
    began: Moment
    wait_s: float
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
            began, requested = Moment(self.step.device), time.perf_counter()
            with record_function(DATA):
                batch = loader.next()
            wait_s = time.perf_counter() - requested
            results = self.step.launch(batch, lr)
            loads = Results(self.expert_use(), self.step.device)
            return Launched(number, lr, began, wait_s, results, loads, loader.state_dict(), loader.token_count)

        launched, pace = self.pace.during(number, lambda: self.memory.during(begin), lambda step: step.results.read())
        launched.measured = {**loader.numbers, **self.step.balance(), "peak_mem_bytes": self.memory.bytes, **pace}
        return launched

    def expert_use(self) -> dict[str, Tensor]:
        """Return metrics of the experts of all pipeline stages, fp64[] each; every rank must call this."""
        state = self.step.state.items()
        names = [*of_routers({name: tensor.like for name, tensor in state})]
        here = of_routers({name: next(iter(tensor.local.values())) for name, tensor in state if tensor.local})
        return unevenness(self.step.runtime.numbers(here, names)) if names else {}

    def read(self, launched: Launched) -> Record:
        """Wait until the device has finished a step, and return its measurements."""
        result = {**launched.results.read(), **launched.loads.read(), "lr": launched.lr}
        seconds = launched.began.until(launched.results.end)
        times = {**speed(self.cfg, self.flops, launched.tokens, seconds), "data_ms": 1e3 * launched.wait_s}
        return {**result, **times, **launched.measured}


class Steps:
    """The loop over steps, which yields their records; `looks(n)` is True if something uses the state after step n.

    `launched` is the step that the device computes while a record is yielded, or None.
    """

    def __init__(self, cfg: Config, step: Step, datasets: Datasets, meters: Meters, looks: Callable[[int], bool]):
        self.cfg, self.step, self.datasets, self.meters, self.looks = cfg, step, datasets, meters, looks
        self.is_ahead = step.device.type in ASYNCHRONOUS
        self.launched: Launched | None = None
        self.rate = rates(cfg)

    def stay(self) -> None:
        """Read the results of each step before launching the next one from now on."""
        self.is_ahead = False

    def is_followed(self, number: int) -> bool:
        """Return True if the next step is launched before the results of step `number` are read."""
        return self.is_ahead and number < self.cfg.train.steps and not self.looks(number)

    def records(self, start: Start) -> Iterator[Record]:
        """Take the steps from `start` to `train.steps` and yield their records; raise Lost if a result is not finite.

        After Lost, the data continue after the lost step, even if a later step was launched.
        """
        self.trace, self.judge, self.spikes = Trace(self.cfg, self.step, start.step), Judge(self.cfg), Spikes()
        self.launched, number, tokens = None, start.step, start.tokens
        while number < self.cfg.train.steps or self.launched:
            last: Launched | None = self.launched
            self.launched = None
            if number < self.cfg.train.steps if last is None else self.is_followed(last.number):
                number += 1
                with self.trace.record_step(number):
                    self.launched = self.launch(number)
                    for step in (last, None if self.is_followed(number) else self.launched):
                        if step is not None:
                            step.results.read()
            if last is not None:
                tokens += last.tokens
                try:
                    record = self.record(last, tokens)
                except Lost:
                    self.datasets.train.load_state_dict(last.data)
                    raise
                yield record

    def launch(self, number: int) -> Launched:
        """Fetch the batch of update `number` and launch the update."""
        launched = self.meters.launch(number, self.datasets.train, self.rate(number))
        if self.cfg.train.ema is not None:
            averages.follow(self.step, self.cfg.train.ema, self.is_applied(launched))
        return launched

    def is_applied(self, launched: Launched) -> Tensor | None:
        """Return bool[] on the device, True if a launched update changes the parameters; None if every update does."""
        norm = launched.results.numbers.get("grad_norm")
        return torch.isfinite(norm) if norm is not None and self.cfg.train.nonfinite == "skip" else None

    def record(self, launched: Launched, tokens: int) -> Record:
        """Return a step's measurements, with the validation that is due after it; raise Lost if they are not finite."""
        record = {"step": launched.number, "tokens": tokens, **self.meters.read(launched)}
        if self.datasets.eval is not None and is_due(launched.number, self.cfg.eval.interval, self.cfg.train.steps):
            batches = validation_batches(self.datasets.eval, self.cfg.eval.batches, not self.cfg.has_own_loss)
            metrics, _ = means(self.step, batches)
            record |= {f"eval_{name}": value for name, value in metrics.items()}
        record = self.judge.check(record)
        if "loss" in record and (remark := self.spikes.message(launched.number, record["loss"])):
            announce(remark)
        return record


def is_due(number: int, interval: int | None, last: int) -> bool:
    """Return True if an action is due after step `number`: every `interval` steps and after the last one."""
    return interval is not None and (number % interval == 0 or number == last)
