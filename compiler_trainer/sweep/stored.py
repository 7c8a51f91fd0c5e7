"""The file of each point of a sweep: its job (`config`, `overrides`), and its outcome.

Each version of the file replaces the one before atomically. After an interruption a point is done, failed, or still
`running`; the last two start again when the sweep is started again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import json_of
from compiler_trainer.config.options import flat
from compiler_trainer.config.schema import Config, Count

FILE = "point.json"

Point = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """The contents of a point's file; the outcome is there only after the end."""

    point: Count
    status: Literal["running", "done", "failed"]
    started: str
    overrides: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    objective: float | None = None
    error: str = ""
    traceback: str = ""
    result: dict[str, float | None] = field(default_factory=dict)


def check(cfg: Config) -> Point | None:
    """Return the point in `cfg`'s folder if it is done; raise UserError if another point or a plain run is there."""
    folder = Path(cfg.run.dir)
    stored = read(folder)
    if stored is None:
        if folder.exists() and any(folder.iterdir()):
            raise UserError("run.dir", f"{folder} exists already and is no point of a sweep; choose another folder")
        return None
    current, recorded = identity(cfg), stored["config"]
    if changed := [name for name in {**recorded, **current} if current.get(name) != recorded.get(name)]:
        old, name = recorded.get(changed[0]), changed[0]
        fix = "choose another folder, or start the sweep with the options it had"
        raise UserError("run.dir", f"{folder} holds a point with {name}={old}, not {current.get(name)}; {fix}")
    return stored if stored["status"] == "done" else None


def identity(cfg: Config) -> dict[str, Any]:
    """Return the options of a point by dotted name, as in JSON, without `run.dir` and `checkpoint.resume=auto`."""
    options = flat(json.loads(json.dumps(dataclasses.asdict(cfg))))
    del options["run.dir"]
    return {name: value for name, value in options.items() if (name, value) != ("checkpoint.resume", "auto")}


def read(folder: Path) -> Point | None:
    """Return the point in a folder, None if there is none; raise UserError naming an unknown field."""
    path = folder / FILE
    return json_of(path, Stored) if path.exists() else None


def write(folder: Path, point: Point) -> None:
    """Write a point's file atomically; it is on disk when this returns."""
    partial = folder / f"{FILE}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(point, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / FILE)
