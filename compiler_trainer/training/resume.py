"""Choose the checkpoint that a run resumes from or a command reads: a named one, or the newest undamaged one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Damaged
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.schema import Config
from compiler_trainer.places.cache import cache_of
from compiler_trainer.places.copies import copy_files
from compiler_trainer.places.store import Place
from compiler_trainer.step.ranks import from_rank_0, rank

BY_NAME = ("latest", "auto")  # values of `checkpoint.resume` that are not paths
T = TypeVar("T")


def checkpoints_of(cfg: Config) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(cfg.checkpoint.dir or Path(cfg.run.dir, "checkpoints"))


def resumable(cfg: Config) -> list[Path]:
    """Return the checkpoints to try in order, or an empty list to start from scratch.

    Raises UserError if `checkpoint.resume=latest` finds none.
    """
    if cfg.checkpoint.resume not in BY_NAME:
        return [] if cfg.checkpoint.resume is None else [named_checkpoint(cfg)]
    folder = checkpoints_of(cfg)
    checkpoints = checkpoint.complete(folder)[::-1]
    if not checkpoints and cfg.checkpoint.resume == "latest":
        fix = "set run.dir or checkpoint.dir to those of the run to resume, or give the path of a checkpoint"
        raise UserError("checkpoint.resume", f"is latest, but {folder} contains no complete checkpoint; {fix}")
    return from_rank_0(lambda: checkpoints)


def named_checkpoint(cfg: Config) -> Path:
    """Return the named checkpoint; one in a store is copied first."""
    name = str(cfg.checkpoint.resume)
    return copy_files(Place(name), Place(name).files(), cache_of(cfg.data)) if is_remote(name) else Path(name)


def first_whole(
    cfg: Config, action: Callable[[Path], T], damaged: tuple[Path, ...] = ()
) -> tuple[T | None, tuple[Path, ...]]:
    """Return the result of `action` for the first checkpoint in which it finds no damage, or None without checkpoints.

    Also return the checkpoints that were skipped: the known `damaged` ones and those found now. Raises Damaged if the
    checkpoint was named, and UserError if all are damaged. Every rank must call this.
    """
    for path in resumable(cfg):
        if path not in damaged:
            try:
                return action(path), damaged
            except Damaged as damage:
                damaged = pass_over(cfg, path, damage, damaged)
    if damaged:
        fix = "remove them, or choose another with checkpoint.resume"
        raise UserError(str(checkpoints_of(cfg)), f"holds {len(damaged)} checkpoints, all of them damaged; {fix}")
    return None, ()


def pass_over(cfg: Config, path: Path, damage: Damaged, damaged: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return `damaged` with `path` added, and report it on rank 0; raise the damage if the checkpoint was named."""
    if cfg.checkpoint.resume not in BY_NAME:
        raise damage
    if rank() == 0:
        print(f"{path} is damaged and passed over: {damage}", file=sys.stderr, flush=True)
    return *damaged, path
