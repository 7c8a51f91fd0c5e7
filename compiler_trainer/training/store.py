"""The store that a run copies its checkpoints to: restore from it, and refuse one that belongs to another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import RemoteCheckpoints, SaveError, Sender
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.step.ranks import from_rank_0, rank
from compiler_trainer.training.resume import BY_NAME, checkpoints_of


def bring(cfg: Config) -> None:
    """Copy the newest checkpoint of the store to disk if the run may resume from it; every rank must call this.

    Raises UserError on all ranks if the store does not answer or has another run's checkpoints.
    """
    store, folder = cfg.checkpoint.store, checkpoints_of(cfg)
    if store is not None and cfg.checkpoint.resume in BY_NAME:
        on_rank_0(lambda: bring_here(store, folder))


def check_store(cfg: Config, done: int) -> None:
    """Raise UserError on all ranks if the store has checkpoints beyond step `done`."""
    store = cfg.checkpoint.store
    if store is not None and cfg.checkpoint.saves and cfg.checkpoint.resume not in BY_NAME:
        on_rank_0(lambda: check_ahead(store, done))


def send_rest(cfg: Config) -> None:
    """Copy the checkpoints that the store lacks; raise SaveError if that fails."""
    if cfg.checkpoint.store is not None and rank() == 0:
        sender = Sender(cfg.checkpoint.store, checkpoints_of(cfg), cfg.checkpoint, say)
        if failure := sender.end():
            raise SaveError(failure)


def bring_here(store: str, folder: Path) -> None:
    """Copy the newest checkpoint of this run's store to `folder`."""
    check_same(store, folder)
    checkpoint.bring_newest(store, folder, say)


def check_same(store: str, folder: Path) -> None:
    """Raise UserError if the newest step that both store and folder have is not the same checkpoint."""
    remote = RemoteCheckpoints(store)
    steps = set(remote.steps())
    common = [path for path in checkpoint.complete(folder) if checkpoint.number_of(path) in steps]
    if common and not remote.is_same(common[-1]):
        problem = f"{store} has another run's {common[-1].name} than {folder}"
        raise UserError("checkpoint.store", f"{problem}; choose another store, or another checkpoint.dir")


def check_ahead(store: str, done: int) -> None:
    """Raise UserError if a store has checkpoints after step `done`."""
    if later := [step for step in RemoteCheckpoints(store).steps() if step > done]:
        fix = "resume from it with checkpoint.resume=auto, or choose another store"
        raise UserError("checkpoint.store", f"{store} has checkpoints up to step {later[-1]:,}; {fix}")


def on_rank_0(action: Callable[[], object]) -> None:
    """Call `action` on rank 0; raise its UserError on all ranks."""

    def refusal() -> tuple[str, str] | None:
        try:
            action()
        except UserError as error:
            return error.where, error.message
        return None

    if (error_args := from_rank_0(refusal)) is not None:
        raise UserError(*error_args)
