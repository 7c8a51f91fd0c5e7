"""List the checkpoints of a folder, decide which ones to keep, and delete or rename them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config.schema import CheckpointConfig

NAME = re.compile(r"step_([0-9]{8,18})")
StepLoss = tuple[int, float | None]  # step, and validation loss if it was evaluated


def path_of(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step_{step:08}"


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder` that were written completely, by step, even if they were damaged later."""
    return sorted((p for p in folder.glob("step_*") if is_name(p)), key=number_of)


def is_name(path: Path) -> bool:
    """Return True if a path has the name of a complete checkpoint."""
    return NAME.fullmatch(path.name) is not None


def number_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def steps_to_keep(checkpoints: Sequence[StepLoss], cfg: CheckpointConfig) -> set[int]:
    """Return the steps whose checkpoints stay: the newest, every n-th step's, and the lowest validation losses'."""
    newest = sorted(step for step, _ in checkpoints)[-cfg.keep :]
    at_intervals = [step for step, _ in checkpoints if cfg.keep_every and step % cfg.keep_every == 0]
    by_loss = sorted((loss, -step) for step, loss in checkpoints if loss is not None)
    return {*newest, *at_intervals, *(-step for _, step in by_loss[: cfg.keep_best])}


def remove(path: Path) -> None:
    """Delete the file, link or folder at a path; of a link, delete only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def discard(path: Path) -> None:
    """Delete a checkpoint such that the remains of an interruption do not look like one."""
    renamed = path.with_suffix(".old.tmp")
    remove(renamed)
    os.rename(path, renamed)
    remove(renamed)


def clear(folder: Path) -> None:
    """Delete the remains of interruptions."""
    for path in folder.glob("step_*.tmp"):
        remove(path)


def aside(folder: Path) -> list[Path]:
    """Return the checkpoints of a run folder, or of a folder of checkpoints, that were set aside."""
    paths = (*folder.glob("step_*.*"), *folder.glob("checkpoints/step_*.*"))
    return sorted(path for path in paths if path.suffix != ".tmp")


def bad_steps(folder: Path) -> set[int]:
    """Return the steps of a folder's checkpoints that a run set aside because their state was bad."""
    return {number_of(path.with_suffix("")) for path in aside(folder) if path.suffix == ".left"}


def set_aside(path: Path, suffix: str) -> None:
    """Rename a checkpoint to end in `suffix`, so that no run resumes from it."""
    place = path.with_suffix(f".{suffix}")
    remove(place)
    os.rename(path, place)
