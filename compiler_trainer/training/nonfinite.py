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

    def __init__(self, step: int, what: str):
        super().__init__(f"{what} at step {step}")
        self.step = step


class Judge:
    """The check of a run's records for values that are not finite."""

    def __init__(self, cfg: Config):
        self.skips, self.in_a_row = cfg.train.nonfinite == "skip", 0

    def finite(self, record: Record) -> Record:
        """Return a record's finite values, with `skipped` if its update was left out.

        Raises Lost if a loss or norm is not finite, or if too many updates in a row were left out.
        """
        lost = {name: value for name, value in record.items() if not math.isfinite(value)}
        what = ", ".join(f"{name} is {value}" for name, value in lost.items())
        left_out = self.skips and "grad_norm" in lost
        self.in_a_row = self.in_a_row + 1 if left_out else 0
        if self.in_a_row == MOST_SKIPPED:
            raise Lost(int(record["step"]), f"{what}, the {MOST_SKIPPED}th time in a row,")
        if not left_out and not lost.keys().isdisjoint(AGREED):
            raise Lost(int(record["step"]), what)
        if lost:
            announce(f"step {record['step']}: {what}{'; the update is left out' if left_out else ''}")
        found = {name: value for name, value in record.items() if name not in lost}
        return {**found, "skipped": 1.0} if left_out else found


class Rollback:
    """The rollback of a run, which began at `start`, to its checkpoints."""

    def __init__(self, cfg: Config, trained: Subject, step: Step, start: Start):
        self.cfg, self.trained, self.step, self.start = cfg, trained, step, start
        self.lost_at = self.times = 0

    def past(self, lost: Lost) -> Start:
        """Load an earlier checkpoint and return the new start.

        Raises Lost with advice if `train.nonfinite` or the number of rollbacks does not permit it, or no checkpoint is
        left.
        """
        if self.cfg.train.nonfinite != "rollback" or self.times == MOST_ROLLED_BACK:
            raise self.advised(lost)
        before = self.start.step if lost.step <= self.lost_at else lost.step
        self.times, self.lost_at = self.times + 1, max(lost.step, self.lost_at)
        for path in self.earlier(before):
            try:
                stored = checkpoint.on_all_ranks(partial(checkpoint.opened, path))
                averages.load(self.step, stored, self.trained.frozen)
            except Damaged as damage:
                announce(f"{path} is damaged and passed over: {damage}")
                continue
            self.start = Start(stored.index.step, stored.index.tokens, stored)
            self.leave_later()
            announce(f"{lost}; going on from {path}, with the data after that step")
            return self.start
        raise self.advised(lost)

    def earlier(self, before: int) -> list[Path]:
        """Return the checkpoints of steps before `before`, newest first, with the one that the run started from."""
        found = {checkpoint.number_of(path): path for path in checkpoint.complete(checkpoints_of(self.cfg))}
        if self.start.stored is not None:
            found.setdefault(self.start.step, self.start.stored.path)
        return from_rank_0(lambda: [path for step, path in sorted(found.items(), reverse=True) if step < before])

    def leave_later(self) -> None:
        """Rename checkpoints after the start, whose state was bad, so that no run resumes from them."""
        if rank() == 0:
            for path in checkpoint.complete(checkpoints_of(self.cfg)):
                if checkpoint.number_of(path) > self.start.step:
                    checkpoint.set_aside(path, "left")

    def advised(self, lost: Lost) -> Lost:
        """Return the error with advice added to its message."""
        if self.cfg.train.nonfinite != "rollback" and self.earlier(lost.step):
            fix = f"go past it with: {how_to_go_on(self.cfg.run.dir)} train.nonfinite=rollback"
        else:
            fix = "start again with a lower optim.lr or optim.max_norm, or with train.nonfinite=skip"
        lost.args = (f"{lost} (train.nonfinite={self.cfg.train.nonfinite}); {fix}",)
        return lost
