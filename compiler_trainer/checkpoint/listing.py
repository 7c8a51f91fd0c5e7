"""The checkpoints of a folder: which there are, which are kept, how they go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config.schema import CheckpointConfig

NAME = re.compile(r"step_([0-9]{8,18})")
Listed = tuple[int, float | None]  # step, and held-out loss if it was evaluated


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step_{step:08}"


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder` whose writing came to its end, by step, whatever became of them since."""
    return sorted((p for p in folder.glob("step_*") if is_name(p)), key=number_of)


def is_name(path: Path) -> bool:
    """Whether it is called what a complete checkpoint is."""
    return NAME.fullmatch(path.name) is not None


def number_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def kept(found: Sequence[Listed], cfg: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints stay: the newest, every n-th step's, and those of the lowest held-out loss."""
    newest = sorted(step for step, _ in found)[-cfg.keep :]
    every = [step for step, _ in found if cfg.keep_every and step % cfg.keep_every == 0]
    evaluated = sorted((loss, -step) for step, loss in found if loss is not None)
    return {*newest, *every, *(-step for _, step in evaluated[: cfg.keep_best])}


def remove(path: Path) -> None:
    """Delete whatever has that name, a folder with all that is in it; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def discard(path: Path) -> None:
    """Delete a checkpoint so that what an interruption leaves does not look like one."""
    gone = path.with_suffix(".old.tmp")
    remove(gone)
    os.rename(path, gone)
    remove(gone)


def clear(folder: Path) -> None:
    """Delete what interruptions left."""
    for partial in folder.glob("step_*.tmp"):
        remove(partial)


def aside(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, or of a folder of checkpoints, that were set aside."""
    found = (*folder.glob("step_*.*"), *folder.glob("checkpoints/step_*.*"))
    return sorted(path for path in found if path.suffix != ".tmp")


def left(folder: Path) -> set[int]:
    """The steps whose checkpoints in a folder a run left, for their state was bad."""
    return {number_of(path.with_suffix("")) for path in aside(folder) if path.suffix == ".left"}


def set_aside(path: Path, why: str) -> None:
    """Give a checkpoint a name that ends in `why`, from which nobody goes on."""
    place = path.with_suffix(f".{why}")
    remove(place)
    os.rename(path, place)
