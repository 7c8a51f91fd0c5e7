"""Early stopping: end a run whose validation loss has not fallen for `eval.patience` evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.step.ranks import from_rank_0
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.metrics import FILE, Record, read


class Patience(Callback):
    """A callback that ends a run after `most` evaluations without a new lowest loss, counted across resumed parts."""

    def __init__(self, most: int):
        self.most, self.losses = most, dict[int, float]()

    def on_start(self, run: Run) -> None:
        """Read the losses of earlier validations."""
        if run.done:
            self.losses = from_rank_0(lambda: read_losses(run.folder / FILE, run.done))
            self.judge(run)

    def on_evaluation(self, run: Run, record: Record) -> None:
        """Add a loss; after a rollback, drop those of later steps."""
        earlier = {step: loss for step, loss in self.losses.items() if step < record["step"]}
        self.losses = {**earlier, int(record["step"]): record["eval_loss"]}
        self.judge(run)

    def judge(self, run: Run) -> None:
        """End the run if the loss has not fallen for too long."""
        if since_lowest(list(self.losses.values())) >= self.most:
            run.stop(f"its validation loss has not fallen for eval.patience={self.most} evaluations")


def since_lowest(losses: Sequence[float]) -> int:
    """Return the number of evaluations after the first lowest loss."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def read_losses(path: Path, done: int) -> dict[int, float]:
    """Return the recorded validation losses up to step `done`, by step."""
    records = read(path) if path.exists() else []
    return {int(r["step"]): r["eval_loss"] for r in records if r["step"] <= done and "eval_loss" in r}
