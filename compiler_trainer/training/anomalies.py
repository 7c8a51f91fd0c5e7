"""Detect what goes wrong without an error: bad numbers, jumps of the loss, copies that differ, slow ranks.

If a loss or gradient is infinite or not a number, `train.nonfinite` decides. `stop` ends the run. `skip` leaves out the
update, inside the compiled step. `rollback` loads an earlier checkpoint and continues with the data after the bad
batch, which is not read again. If it happens again before the run has passed that step, the state itself was bad, and
an earlier checkpoint is loaded.

Copies of parameters, moments and buffers that ranks hold are compared; a flipped bit would otherwise go unnoticed. Each
rank sums the bits of its state. One sum of all tensors with the same axes is gathered first. Only if copies differ are
sums per tensor gathered, which identify the tensor and the rank.

A collective ends on all ranks at the same time, so a slow rank makes all steps equally long on all ranks. Only the
working time before a collective differs. The profiler measures it at intervals: on a CPU as the time outside of waits
for collectives, on CUDA as the time in which kernels other than NCCL's run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Damaged
from compiler_trainer.config.errors import RepeatingError, RunError
from compiler_trainer.config.schema import Config
from compiler_trainer.elastic.member import LeftOut
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.ranks import from_rank_0, gather, host_group, rank
from compiler_trainer.step.step import Step, programs_of
from compiler_trainer.training import averages
from compiler_trainer.training.checkpoints import checkpoints_of, unchanged
from compiler_trainer.training.loggers import announce
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.prepare import Start
from compiler_trainer.training.stop import how_to_go_on
from compiler_trainer.training.trace import WAITS, covered_time
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec
from passes.torch_private import is_profiling

MOST_SKIPPED = 10  # updates in a row
MOST_ROLLED_BACK = 5  # times in a run
AGREED = ("loss", "grad_norm", "eval_loss")  # metrics that are equal on all ranks, so all decide alike


class Lost(RepeatingError):
    """An error of a run that cannot continue because of the values at `step`, which the message names."""

    def __init__(self, step: int, problem: str):
        super().__init__(f"{problem} at step {step}")
        self.step = step


class Judge:
    """The check of a run's records for values that are not finite."""

    def __init__(self, cfg: Config):
        self.skips, self.skips_in_a_row = cfg.train.nonfinite == "skip", 0

    def check(self, record: Record) -> Record:
        """Return a record's finite values, with `skipped` if its update was left out.

        Raises Lost if a loss or norm is not finite, or if too many updates in a row were left out.
        """
        bad_values = {name: value for name, value in record.items() if not math.isfinite(value)}
        problem = ", ".join(f"{name} is {value}" for name, value in bad_values.items())
        is_skipped = self.skips and "grad_norm" in bad_values
        self.skips_in_a_row = self.skips_in_a_row + 1 if is_skipped else 0
        if self.skips_in_a_row == MOST_SKIPPED:
            raise Lost(int(record["step"]), f"{problem}, the {MOST_SKIPPED}th time in a row,")
        if not is_skipped and not bad_values.keys().isdisjoint(AGREED):
            raise Lost(int(record["step"]), problem)
        if bad_values:
            announce(f"step {record['step']}: {problem}{'; the update is skipped' if is_skipped else ''}")
        finite_values = {name: value for name, value in record.items() if name not in bad_values}
        return {**finite_values, "skipped": 1.0} if is_skipped else finite_values


class Rollback:
    """The rollback of a run, which began at `start`, to its checkpoints."""

    def __init__(self, cfg: Config, trained: Subject, step: Step, start: Start):
        self.cfg, self.trained, self.step, self.start = cfg, trained, step, start
        self.last_lost_step = self.times = 0

    def recover(self, lost: Lost) -> Start:
        """Load an earlier checkpoint and return the new start.

        Raises Lost with advice if `train.nonfinite` or the number of rollbacks does not permit it, or no checkpoint is
        left.
        """
        if self.cfg.train.nonfinite != "rollback" or self.times == MOST_ROLLED_BACK:
            raise self.with_advice(lost)
        before = self.start.step if lost.step <= self.last_lost_step else lost.step
        self.times, self.last_lost_step = self.times + 1, max(lost.step, self.last_lost_step)
        for path in self.earlier_checkpoints(before):
            try:
                ckpt = checkpoint.on_all_ranks(partial(checkpoint.opened, path))
                averages.load(self.step, ckpt, unchanged(self.trained, programs_of(self.step.train).values()))
            except Damaged as damage:
                announce(f"{path} is damaged and passed over: {damage}")
                continue
            self.start = Start(ckpt.index.step, ckpt.index.tokens, ckpt)
            self.set_aside_later()
            announce(f"{lost}; continuing from {path}, with the data after that step")
            return self.start
        raise self.with_advice(lost)

    def earlier_checkpoints(self, before: int) -> list[Path]:
        """Return the checkpoints of steps before `before`, newest first, with the one that the run started from."""
        paths = {checkpoint.number_of(path): path for path in checkpoint.complete(checkpoints_of(self.cfg))}
        if self.start.ckpt is not None and not self.start.ckpt.holders:  # a snapshot is no longer there
            paths.setdefault(self.start.step, self.start.ckpt.path)
        return from_rank_0(lambda: [path for step, path in sorted(paths.items(), reverse=True) if step < before])

    def set_aside_later(self) -> None:
        """Rename checkpoints after the start, whose state was bad, so that no run resumes from them."""
        if rank() == 0:
            for path in checkpoint.complete(checkpoints_of(self.cfg)):
                if checkpoint.number_of(path) > self.start.step:
                    checkpoint.set_aside(path, "left")

    def with_advice(self, lost: Lost) -> Lost:
        """Return the error with advice added to its message."""
        if self.cfg.train.nonfinite != "rollback" and self.earlier_checkpoints(lost.step):
            fix = f"to continue past it, run: {how_to_go_on(self.cfg.run.dir)} train.nonfinite=rollback"
        else:
            fix = "start again with a lower optim.lr or optim.max_norm, or with train.nonfinite=skip"
        lost.args = (f"{lost} (train.nonfinite={self.cfg.train.nonfinite}); {fix}",)
        return lost


# ---- jumps of the loss ---------------------------------------------------------------------------------

WINDOW = 50  # steps
FEWEST = 20  # losses needed before a jump can be reported
DEVIATIONS = 6.0


class Spikes:
    """The losses of the last steps, without spikes."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def message(self, step: int, loss: float) -> str:
        """Return a message if a step's loss is a spike, otherwise an empty string.

        A spike is not added to the usual losses.
        """
        if len(self.losses) >= FEWEST:
            mean, deviation = statistics.fmean(self.losses), statistics.stdev(self.losses)
            if loss > mean + DEVIATIONS * deviation:
                usual_range = f"{mean:.3f} ± {deviation:.3f} of the last {len(self.losses)} steps"
                self.losses.popleft()  # so that a new level becomes usual after a while
                return f"step {step}: the loss jumps to {loss:.3f}, far from {usual_range}"
        self.losses.append(loss)
        return ""


# ---- copies that differ --------------------------------------------------------------------------------

SHOWN = 4
WORD_BYTES = 8


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ; `right` are the ranks of the majority, empty if there is none."""

    name: str
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    def __str__(self) -> str:
        if not self.right:
            return f"{self.name} differs between ranks {list_ranks(self.wrong)}, and no majority shows which is right"
        return f"{self.name} on {rank_names(self.wrong)} differs from its copy on {rank_names(self.right)}"


class Replicas:
    """The periodic comparison of copies, which stops the run or repairs it as `train.replica_check` says."""

    def __init__(self, cfg: Config, step: Step):
        self.cfg, self.step = cfg, step
        self.is_on = cfg.train.replica_check.interval is not None and step.runtime.mesh.world_size > 1

    def check(self, number: int) -> None:
        """Compare copies after step `number`; raise RunError if they differ and are not repaired."""
        differing = differences(self.step) if self.is_on else []
        if not differing:
            return
        text = "; ".join(map(str, differing[:SHOWN])) + (
            f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        )
        if self.cfg.train.replica_check.action == "repair" and all(d.right for d in differing):
            repair(self.step, differing)
            announce(f"after step {number}: {text}; repaired")
            return
        if self.cfg.train.replica_check.action == "leave_out" and all(d.right for d in differing):
            raise LeftOut({rank for d in differing for rank in d.wrong}, f"{text} after step {number}")
        problem = f"{text} after step {number} (train.replica_check.action={self.cfg.train.replica_check.action})"
        raise RunError(
            f"{problem}; the last checkpoint was saved before, resume with: {how_to_go_on(self.cfg.run.dir)}"
        )


class Copies(NamedTuple):
    """A key of the ranks that hold copies of a tensor.

    They are ranks of some pipeline stages, with equal coordinates on the axes `apart`.
    """

    apart: tuple[str, ...]
    stages: tuple[int, ...]


def differences(step: Step) -> list[Difference]:
    """Return the tensors whose copies differ between ranks; every rank must call this."""
    state = {name: entry for name, entry in step.state.items() if not name.startswith("gradient.")}
    keys = [Copies(axes_of(entry.spec, step.mesh), entry.stages) for entry in state.values()]
    kinds = sorted(set(keys))
    factors = torch.arange(1, 2 * len(keys), 2, device=step.device)  # odd, so that multiplying modulo 2^64 loses no bit
    sums = {r: torch.stack([bit_sum(entry.local.get(r), step.device) for entry in state.values()]) for r in step.ranks}
    members = [torch.tensor([key == kind for key in keys], device=step.device) for kind in kinds]
    joint = {r: torch.stack([(factors * sums[r])[which].sum() for which in members]) for r in step.ranks}
    if not any(compare_copies(kinds, step.runtime.all_locals(joint), step)):
        return []
    names = list(state)
    return [
        judge(names[number], values) for number, values in compare_copies(keys, step.runtime.all_locals(sums), step)
    ]


def compare_copies(keys: list[Copies], by_rank: list[Tensor], step: Step) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield (column, its value by rank) for each group of copies whose values differ."""
    rows = [row.tolist() for row in by_rank]
    places = [step.mesh.coordinates(rank) for rank in range(len(rows))]
    for number, (axes, stages) in enumerate(keys):
        copies: dict[tuple[int, ...], dict[int, int]] = {}
        for holder, place in enumerate(places):
            if step.runtime.stage_of(holder) in stages:
                copies.setdefault(tuple(place[axis] for axis in axes), {})[holder] = rows[holder][number]
        yield from ((number, values) for values in copies.values() if len(set(values.values())) > 1)


def judge(name: str, values: dict[int, int]) -> Difference:
    """Return the difference, with the ranks that hold the most frequent value as `right` if they are a majority."""
    (value, count), *_ = Counter(values.values()).most_common()
    if 2 * count <= len(values):
        return Difference(name, (), tuple(values))
    right = tuple(rank for rank, word in values.items() if word == value)
    return Difference(name, right, tuple(rank for rank in values if rank not in right))


def repair(step: Step, differing: list[Difference]) -> None:
    """Overwrite wrong copies with a right one; every rank must call this."""
    for difference in differing:
        entry = step.state[difference.name]
        step.runtime.send(entry.local, difference.right[0], difference.wrong, entry.like)


def axes_of(spec: Spec, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh on which ranks hold different parts of a tensor."""
    sharded = {axis for name in spec.sharded for axis in mesh.over(name)}
    return tuple(axis for axis in mesh.axes if axis in sharded or spec.state(axis) != "invariant")


def bit_sum(local: Tensor | None, device: torch.device) -> Tensor:
    """Return the sum of a tensor's bits as 64-bit words, modulo 2^64, or 0 for None.

    Every single flipped bit changes it.
    """
    if local is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    end = len(flat) // WORD_BYTES * WORD_BYTES
    return flat[:end].view(torch.int64).sum() + flat[end:].sum(dtype=torch.int64)


def rank_names(numbers: tuple[int, ...]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {list_ranks(numbers)}"


def list_ranks(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")


# ---- slow ranks ----------------------------------------------------------------------------------------

SLOW = 1.2  # times the median working time, from which on a rank is reported
RANKS = ("busy_ms_median", "busy_ms_max", "slowest_rank", "wait_share")  # names of the metrics
T = TypeVar("T")


class Pace:
    """The measurement of one step in every `run.pace_interval`, if there are several ranks."""

    def __init__(self, cfg: Config, on_cuda: bool):
        self.interval = cfg.run.pace_interval if dist.is_initialized() and dist.get_world_size() > 1 else None
        self.first = 10 if cfg.run.profile else 2  # run.profile uses the profiler in the first steps
        self.kind = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
        self.group = host_group() if self.interval else None
        self.steps_taken, self.suspect, self.limit = 0, -1, cfg.run.most_slowdown

    def during(self, number: int, launch: Callable[[], T], wait: Callable[[T], object]) -> tuple[T, Record]:
        """Launch step `number`; return it, with metrics of the ranks if it is measured, which waits for the step's end.

        Every rank must call this.
        """
        self.steps_taken += 1
        is_due = self.interval and number % self.interval == 0 and self.steps_taken >= self.first
        if not is_due or is_profiling():  # profilers must not be nested; traces cover the same steps on all ranks
            return launch(), {}
        with profile(activities=[self.kind], acc_events=True) as profiler:
            start_time = time.perf_counter()
            result = launch()
            wait(result)
            whole_ms = 1e3 * (time.perf_counter() - start_time)
        busy_ms = self.busy_ms(profiler.events(), whole_ms)
        times = gather((busy_ms, 1 - busy_ms / whole_ms), self.group)
        return result, self.compare(number, [b for b, _ in times], [w for _, w in times])

    def busy_ms(self, events: Iterable[FunctionEvent], whole_ms: float) -> float:
        """Return the milliseconds of a step in which this rank did not wait for others."""
        if self.kind is ProfilerActivity.CPU:
            return whole_ms - covered_ms(e for e in events if e.name in WAITS)
        kernels = (e for e in events if e.device_type == DeviceType.CUDA)
        return covered_ms(e for e in kernels if "nccl" not in e.name.lower())

    def compare(self, number: int, busy_ms: Sequence[float], wait_shares: Sequence[float]) -> Record:
        """Return metrics of all ranks' working times (ms) and shares of waiting; report a slow rank.

        A rank is reported only if it was the slow one in the previous measurement too, because one may be chance.
        Raises LeftOut for one that is slower than `run.most_slowdown` allows, if no other rank is slow: ranks that have
        more rows of a batch than others are.
        """
        median, longest = statistics.median_low(busy_ms), max(busy_ms)
        slowest = busy_ms.index(longest)
        previous, self.suspect = self.suspect, slowest if longest > SLOW * median else -1
        if self.suspect >= 0 and self.suspect == previous:
            problem = f"rank {slowest} works {longest:,.0f} ms, the median rank {median:,.0f} ms"
            announce(f"step {number}: {problem}; the others wait for it")
            is_alone = sorted(busy_ms)[-2] <= SLOW * median
            if self.limit is not None and is_alone and longest > self.limit * median:
                raise LeftOut({slowest}, problem)
        return dict(zip(RANKS, (median, longest, float(slowest), statistics.fmean(wait_shares))))


def covered_ms(events: Iterable[FunctionEvent]) -> float:
    """Return the milliseconds that at least one of some events covers."""
    return covered_time((event.time_range.start, event.time_range.end) for event in events) / 1e3
