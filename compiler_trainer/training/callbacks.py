"""Callbacks: user code that a run calls while it trains, and that may end the run."""

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
    """The view of a run that callbacks get.

    Attributes:
        cfg: the options of the run, as frozen dataclasses.
        step: the compiled step.
        done: the number of steps before this start, not 0 in a resumed run.
        ask: the function that `stop` calls.
    """

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
        """The rank of this process; only rank 0 should write and print."""
        return rank()

    def stop(self, why: str) -> None:
        """Make this step the last one: a checkpoint is saved, and all ranks end, no matter which rank calls this.

        Args:
            why: the text that the run prints and logs.
        """
        self.ask(why)

    def state_dict(self) -> dict[str, Tensor]:
        """Return full parameters and buffers by the model's own names; every rank must call this at the same step."""
        return self.step.state_dict()


class Callback:
    """The base class of callbacks, which are called on every rank; a method that is not overridden does nothing.

    An exception in a callback ends the run. After a rollback, steps are repeated with the same numbers.
    """

    def on_start(self, run: Run) -> None:
        """Start; the `run` has compiled its step and loaded its state."""

    def on_step(self, run: Run, record: Record) -> None:
        """Look at a step that is done; `record` is its line of metrics.jsonl, with `step`, `loss` and `lr`.

        A class with this method sees the state of the `run` right after each step. On a GPU, the host then waits for
        every step before it launches the next one; otherwise it launches the next one first.
        """

    def on_evaluation(self, run: Run, record: Record) -> None:
        """Look at an evaluation, after `on_step` of the same step of the `run`: `record` has `eval_loss`."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Use a checkpoint, the folder `path`, which is complete on disk.

        Writing is asynchronous: the checkpoint is that of this step of the `run` or of an earlier one.
        """

    def on_stop(self, run: Run) -> None:
        """Finish, after the last checkpoint of the `run`; not called if an error ended it."""


class Callbacks:
    """The callbacks of a run, called in order."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]):
        self.run, self.callbacks = run, callbacks
        self.pending_path: Path | None = None  # a checkpoint that is being written
        self.look_at_steps = any(type(callback).on_step is not Callback.on_step for callback in callbacks)

    def start(self) -> None:
        """Call `on_start` of each callback."""
        for callback in self.callbacks:
            callback.on_start(self.run)

    def step(self, record: Record) -> None:
        """Call `on_step` of each callback, and `on_evaluation` if the step was evaluated."""
        for callback in self.callbacks:
            callback.on_step(self.run, record)
            if "eval_loss" in record:
                callback.on_evaluation(self.run, record)

    def begin_checkpoint(self, path: Path) -> None:
        """Note that the checkpoint at `path` is being written."""
        self.pending_path = path

    def end_checkpoint(self, is_whole: bool) -> None:
        """Call `on_checkpoint` for the noted checkpoint, if it is complete."""
        path, self.pending_path = self.pending_path, None
        if path is not None and is_whole:
            for callback in self.callbacks:
                callback.on_checkpoint(self.run, path)

    def stop(self) -> None:
        """Report the last checkpoint, which is complete, and call `on_stop` of each callback."""
        self.end_checkpoint(True)
        for callback in self.callbacks:
            callback.on_stop(self.run)


def build_callbacks(cfg: Config) -> list[Callback]:
    """Return the callbacks that the options name; raise UserError for an object that is not a Callback."""
    callbacks = []
    for number, target in enumerate(cfg.train.callbacks):
        callback = called(target, place := f"train.callbacks[{number}]")
        if not isinstance(callback, Callback):
            problem = (
                f"{target['_target_']} makes a {type(callback).__name__}, which is not a compiler_trainer.Callback"
            )
            raise UserError(place, f"{problem}; derive the class from it")
        callbacks.append(callback)
    return callbacks
