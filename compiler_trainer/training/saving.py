"""Save the checkpoints of a run, each with the position of training and of its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from compiler_trainer.checkpoint import Saver, TrainState
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.data.loader import Loader
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.step import Step
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.progress import announce
from compiler_trainer.training.resume import checkpoints_of


@dataclass(frozen=True)
class Save:
    """A function that saves checkpoints, which are written while training continues; a no-op without a saver."""

    cfg: Config
    saver: Saver | None

    def __call__(self, record: Record, loader: Loader) -> None:
        """Save a checkpoint after the step of `record`, with the loader's current position."""
        if self.saver is not None:
            self.saver.save(state_after(record, loader, self.cfg))

    def wait(self) -> bool:
        """Wait for the last checkpoint; return True if it was written completely, the same on all ranks."""
        return self.saver is not None and not self.saver.wait()

    @property
    def is_writing(self) -> bool:
        """True while the last checkpoint is being written."""
        return self.saver is not None and self.saver.pending is not None and not self.saver.pending.done()


@contextmanager
def saving(cfg: Config, trained: Subject, step: Step) -> Iterator[Save]:
    """Yield a function that saves a checkpoint, and wait for the last one at the end."""
    if not cfg.checkpoint.saves:
        yield Save(cfg, None)
        return
    excluded = frozenset() if cfg.checkpoint.frozen else trained.frozen
    with Saver(step, checkpoints_of(cfg), cfg.checkpoint, excluded, say) as saver:
        announce(f"checkpoints {save_times(cfg)}, through {saver.staging.bytes / 2**20:,.1f} MiB of host memory a rank")
        if cfg.checkpoint.store:
            announce(f"each is copied to {cfg.checkpoint.store}")
        yield Save(cfg, saver)


def save_times(cfg: Config) -> str:
    """Return after which steps checkpoints are saved, as text."""
    interval = cfg.checkpoint.interval or 0
    return "after the last step" if interval >= cfg.train.steps else f"every {interval:,} steps and after the last"


def state_after(record: Record, loader: Loader, cfg: Config) -> TrainState:
    """Return the position of training after the step of `record`."""
    return TrainState(
        step=int(record["step"]),
        tokens=int(record["tokens"]),
        data=dict(loader.state_dict()),
        config=dataclasses.asdict(cfg),
        eval_loss=record.get("eval_loss"),
    )
