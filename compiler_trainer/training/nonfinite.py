"""Handle a loss or gradient that is infinite or not a number, as `train.nonfinite` says.

`stop` ends the run. `skip` leaves out the update, inside the compiled step. `rollback` loads an earlier checkpoint and
continues with the data after the bad batch, which is not read again. If it happens again before the run has passed that
step, the state itself was bad, and an earlier checkpoint is loaded.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Damaged
from compiler_trainer.config.errors import RunError
from compiler_trainer.config.schema import Config
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.ranks import from_rank_0, rank
from compiler_trainer.step.step import Step
from compiler_trainer.training import averages
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.prepare import Start
from compiler_trainer.training.progress import announce
from compiler_trainer.training.resume import checkpoints_of
from compiler_trainer.training.stop import how_to_go_on

MOST_SKIPPED = 10  # updates in a row
MOST_ROLLED_BACK = 5  # times in a run
AGREED = ("loss", "grad_norm", "eval_loss")  # metrics that are equal on all ranks, so all decide alike


class Lost(RunError):
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
                averages.load(self.step, ckpt, self.trained.frozen)
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
        if self.start.ckpt is not None:
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
