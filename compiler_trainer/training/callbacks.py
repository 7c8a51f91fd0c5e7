"""What a run tells while it trains: callbacks of one's own, which may look at it, and ask it to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.targets import called
from compiler_trainer.step.ranks import rank
from compiler_trainer.step.step import Step
from compiler_trainer.training.metrics import Record


@dataclass
class Run:
    """A run as a callback sees it: its options, its compiled step, the steps `done` before it began."""

    cfg: Config
    step: Step
    done: int
    ask: Callable[[str], None]

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.cfg.run.dir)

    @property
    def rank(self) -> int:
        """The number of this process; 0 writes and prints."""
        return rank()

    def stop(self, why: str) -> None:
        """Let this step be the last: a checkpoint is taken, and all ranks end, whichever of them asks."""
        self.ask(why)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers in full, by the model's own names; every rank has to call it at the same step."""
        return self.step.state_dict()


class Callback:
    """What a run tells, on every rank alike; a method that is left out does nothing.

    What is raised here ends the run. After a rollback steps come again, with the numbers that they had.
    """

    def on_start(self, run: Run) -> None:
        """The step is compiled, its state loaded, and none of this start's steps is taken."""

    def on_step(self, run: Run, record: Record) -> None:
        """A step is done; `record` is its line of metrics.jsonl, with `step`, `loss` and `lr`.

        A class that has this method sees the state right after each step. On a GPU the host then waits for every step
        before it launches the next, which is otherwise launched first.
        """

    def on_evaluation(self, run: Run, record: Record) -> None:
        """After `on_step` where the step was evaluated: `record` has `eval_loss`."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint is whole on the disk, of that step or of one some steps ago: it is written beside training."""

    def on_stop(self, run: Run) -> None:
        """The run ends, after its last checkpoint, whatever ended it but an error."""


class Callbacks:
    """The callbacks of a run, told in turn."""

    def __init__(self, run: Run, each: Sequence[Callback]):
        self.run, self.each = run, each
        self.saved: Path | None = None  # a checkpoint that is being written
        self.look_at_steps = any(type(callback).on_step is not Callback.on_step for callback in each)

    def start(self) -> None:
        """Tell that the run begins."""
        for callback in self.each:
            callback.on_start(self.run)

    def step(self, record: Record) -> None:
        """Tell of a step, and of its evaluation."""
        for callback in self.each:
            callback.on_step(self.run, record)
            if "eval_loss" in record:
                callback.on_evaluation(self.run, record)

    def saves(self, path: Path) -> None:
        """Note that a checkpoint is being written."""
        self.saved = path

    def written(self, is_whole: bool) -> None:
        """Tell of it, unless it could not be written."""
        path, self.saved = self.saved, None
        if path is not None and is_whole:
            for callback in self.each:
                callback.on_checkpoint(self.run, path)

    def stop(self) -> None:
        """Tell of the last checkpoint, which is whole, and that the run ends."""
        self.written(True)
        for callback in self.each:
            callback.on_stop(self.run)


def build_callbacks(cfg: Config) -> list[Callback]:
    """The callbacks that options name; raises UserError where one is none."""
    found = []
    for number, own in enumerate(cfg.train.callbacks):
        callback = called(own, where := f"train.callbacks[{number}]")
        if not isinstance(callback, Callback):
            what = f"{own['_target_']} makes a {type(callback).__name__}, no compiler_trainer.Callback"
            raise UserError(where, f"{what}; derive it from that")
        found.append(callback)
    return found
