"""Early stopping: a run ends where its held-out loss has not fallen for so many evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.step.ranks import from_rank_0
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.metrics import FILE, Record, read


class Patience(Callback):
    """Counts validations since the lowest loss, `most` at most; a resumed run counts on."""

    def __init__(self, most: int):
        self.most, self.losses = most, dict[int, float]()

    def on_start(self, run: Run) -> None:
        """Read the losses of earlier validations."""
        if run.done:
            self.losses = from_rank_0(lambda: evaluated(run.folder / FILE, run.done))
            self.judge(run)

    def on_evaluation(self, run: Run, record: Record) -> None:
        """Add a loss; a step that is taken again replaces those that were lost."""
        before = {step: loss for step, loss in self.losses.items() if step < record["step"]}
        self.losses = {**before, int(record["step"]): record["eval_loss"]}
        self.judge(run)

    def judge(self, run: Run) -> None:
        """End the run if the loss has not fallen for too long."""
        if since_lowest(list(self.losses.values())) >= self.most:
            run.stop(f"its held-out loss has not fallen for eval.patience={self.most} evaluations")


def since_lowest(losses: Sequence[float]) -> int:
    """How many evaluations came after the lowest loss, the first of those that are equal."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def evaluated(path: Path, done: int) -> dict[int, float]:
    """The held-out losses up to a step, as a run has recorded them."""
    records = read(path) if path.exists() else []
    return {int(each["step"]): each["eval_loss"] for each in records if each["step"] <= done and "eval_loss" in each}
