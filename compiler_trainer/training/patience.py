"""Early stopping: a run ends where its held-out loss has not fallen for so many evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config.schema import Config
from compiler_trainer.step.ranks import from_rank_0
from compiler_trainer.training.metrics import FILE, Record, read


class Patience:
    """Counts evaluations since the lowest held-out loss; a run that goes on after step `done` counts on."""

    def __init__(self, cfg: Config, done: int):
        self.most, self.losses = cfg.eval.patience, dict[int, float]()
        if self.most is not None and done:
            self.losses = from_rank_0(lambda: evaluated(Path(cfg.run.dir) / FILE, done))

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return self.most is not None and since_lowest(list(self.losses.values())) >= self.most

    def add(self, record: Record) -> None:
        """Take in the record of a step; a step that is taken again takes the place of those that were lost."""
        if "eval_loss" in record:
            before = {step: loss for step, loss in self.losses.items() if step < record["step"]}
            self.losses = {**before, int(record["step"]): record["eval_loss"]}


def since_lowest(losses: Sequence[float]) -> int:
    """How many evaluations came after the lowest loss, the first of those that are equal."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def evaluated(path: Path, done: int) -> dict[int, float]:
    """The held-out losses up to a step, as a run has recorded them."""
    records = read(path) if path.exists() else []
    return {int(each["step"]): each["eval_loss"] for each in records if each["step"] <= done and "eval_loss" in each}
