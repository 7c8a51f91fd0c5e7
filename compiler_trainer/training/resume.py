"""Which checkpoint a run goes on from, or a command reads: the one that is named, or the newest that is whole."""

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
from compiler_trainer.places.copies import copied
from compiler_trainer.places.store import Place
from compiler_trainer.step.ranks import from_rank_0, rank

BY_NAME = ("latest", "auto")  # what `checkpoint.resume` may be beside a path
T = TypeVar("T")


def checkpoints_of(cfg: Config) -> Path:
    """Where the checkpoints of a run go."""
    return Path(cfg.checkpoint.dir or Path(cfg.run.dir, "checkpoints"))


def resumable(cfg: Config) -> list[Path]:
    """The checkpoints to try in turn, none to start anew; raises UserError if `latest` finds none."""
    if cfg.checkpoint.resume not in BY_NAME:
        return [] if cfg.checkpoint.resume is None else [named(cfg)]
    folder = checkpoints_of(cfg)
    found = checkpoint.complete(folder)[::-1]
    if not found and cfg.checkpoint.resume == "latest":
        fix = "set run.dir or checkpoint.dir to those of the run to go on with, or name a checkpoint"
        raise UserError("checkpoint.resume", f"is latest, but {folder} holds no complete checkpoint; {fix}")
    return from_rank_0(lambda: found)


def named(cfg: Config) -> Path:
    """The checkpoint that is named, of one in a store a copy."""
    name = str(cfg.checkpoint.resume)
    return copied(Place(name), Place(name).files(), cache_of(cfg.data)) if is_remote(name) else Path(name)


def first_whole(
    cfg: Config, action: Callable[[Path], T], damaged: tuple[Path, ...] = ()
) -> tuple[T | None, tuple[Path, ...]]:
    """What `action` gives for the first checkpoint in which it finds no damage, None to start anew; every rank calls.

    With it those that were passed over, which are `damaged` ones that were known of before and what it found now.
    Raises Damaged for a checkpoint that was named, UserError if none is whole.
    """
    for path in resumable(cfg):
        if path not in damaged:
            try:
                return action(path), damaged
            except Damaged as damage:
                damaged = pass_over(cfg, path, damage, damaged)
    if damaged:
        fix = "remove them, or name another with checkpoint.resume"
        raise UserError(str(checkpoints_of(cfg)), f"holds {len(damaged)} checkpoints, all of them damaged; {fix}")
    return None, ()


def pass_over(cfg: Config, path: Path, damage: Damaged, damaged: tuple[Path, ...]) -> tuple[Path, ...]:
    """`damaged` with one more, of which rank 0 tells; raises the damage again where that checkpoint was named."""
    if cfg.checkpoint.resume not in BY_NAME:
        raise damage
    if rank() == 0:
        print(f"{path} is damaged and passed over: {damage}", file=sys.stderr, flush=True)
    return *damaged, path
