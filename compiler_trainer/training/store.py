"""The store that a run copies its checkpoints to: what it begins with, and what it must not be mixed with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Elsewhere, SaveError, Sender
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.step.ranks import from_rank_0, rank
from compiler_trainer.training.resume import BY_NAME, checkpoints_of


def bring(cfg: Config) -> None:
    """Copy the newest checkpoint of the store to the disk, where it is to be gone on from; every rank calls.

    Raises UserError, on all of them, where the store does not answer or has another run's checkpoints.
    """
    store, folder = cfg.checkpoint.store, checkpoints_of(cfg)
    if store is not None and cfg.checkpoint.resume in BY_NAME:
        on_rank_0(lambda: bring_here(store, folder))


def check_store(cfg: Config, done: int) -> None:
    """Raise UserError, on all ranks, where the store has checkpoints beyond the steps that are done."""
    store = cfg.checkpoint.store
    if store is not None and cfg.checkpoint.saves and cfg.checkpoint.resume not in BY_NAME:
        on_rank_0(lambda: check_ahead(store, done))


def send_rest(cfg: Config) -> None:
    """Copy to the store what it lacks of the run's checkpoints; raises SaveError where that cannot be."""
    if cfg.checkpoint.store is not None and rank() == 0:
        sender = Sender(cfg.checkpoint.store, checkpoints_of(cfg), cfg.checkpoint, say)
        if failure := sender.end():
            raise SaveError(failure)


def bring_here(store: str, folder: Path) -> None:
    """Copy the newest checkpoint of this run's store."""
    check_same(store, folder)
    checkpoint.bring_newest(store, folder, say)


def check_same(store: str, folder: Path) -> None:
    """Raise UserError where the newest step that both have is not the same checkpoint."""
    there = Elsewhere(store)
    steps = set(there.steps())
    both = [path for path in checkpoint.complete(folder) if checkpoint.number_of(path) in steps]
    if both and not there.is_same(both[-1]):
        what = f"{store} has another run's {both[-1].name} than {folder}"
        raise UserError("checkpoint.store", f"{what}; name another, or another checkpoint.dir")


def check_ahead(store: str, done: int) -> None:
    """Raise UserError where a store has checkpoints of later steps."""
    if ahead := [step for step in Elsewhere(store).steps() if step > done]:
        fix = "go on from it with checkpoint.resume=auto, or name another"
        raise UserError("checkpoint.store", f"{store} has checkpoints up to step {ahead[-1]:,}; {fix}")


def on_rank_0(action: Callable[[], object]) -> None:
    """Do something on rank 0; raises its UserError on all ranks."""

    def refusal() -> tuple[str, str] | None:
        try:
            action()
        except UserError as error:
            return error.where, error.message
        return None

    if (said := from_rank_0(refusal)) is not None:
        raise UserError(*said)
