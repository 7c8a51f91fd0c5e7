"""When and what a run saves: its checkpoints, each with where training and its data stand."""

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
    """Takes checkpoints of a run, which go on being written while training does; none without a saver."""

    cfg: Config
    saver: Saver | None

    def __call__(self, record: Record, loader: Loader) -> None:
        """Take one, after the step of a record and as the loader stands."""
        if self.saver is not None:
            self.saver.save(state_after(record, loader, self.cfg))

    def wait(self) -> bool:
        """Wait until the last one is written, or has failed; whether it is whole, the same on all ranks."""
        return self.saver is not None and not self.saver.wait()

    @property
    def is_writing(self) -> bool:
        """Whether the last one is still being written."""
        return self.saver is not None and self.saver.pending is not None and not self.saver.pending.done()


@contextmanager
def saving(cfg: Config, trained: Subject, step: Step) -> Iterator[Save]:
    """What to call for a checkpoint; the end waits for the last one."""
    if not cfg.checkpoint.saves:
        yield Save(cfg, None)
        return
    without = frozenset() if cfg.checkpoint.frozen else trained.frozen
    with Saver(step, checkpoints_of(cfg), cfg.checkpoint, without, say) as saver:
        announce(f"checkpoints {when(cfg)}, through {saver.staging.bytes / 2**20:,.1f} MiB of host memory a rank")
        if cfg.checkpoint.store:
            announce(f"each is copied to {cfg.checkpoint.store}")
        yield Save(cfg, saver)


def when(cfg: Config) -> str:
    """After which steps there are checkpoints."""
    interval = cfg.checkpoint.interval or 0
    return "after the last step" if interval >= cfg.train.steps else f"every {interval:,} steps and after the last"


def state_after(record: Record, loader: Loader, cfg: Config) -> TrainState:
    """Where training stands after the step of a record."""
    return TrainState(
        step=int(record["step"]),
        tokens=int(record["tokens"]),
        data=dict(loader.state_dict()),
        config=dataclasses.asdict(cfg),
        eval_loss=record.get("eval_loss"),
    )
