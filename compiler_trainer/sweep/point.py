"""One point of a sweep: run once, recorded whatever becomes of it, left alone once it is done.

A point's folder holds `point.json` from its start on: what was asked (`config`, `overrides`), and in the end what came
of it. Each version of the file replaces the one before at once, so that an interruption at any time leaves a point
that is either done, failed, or still `running`; the last two start anew when the sweep is started again.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from compiler_trainer.config import Config
from compiler_trainer.errors import UserError

FILE = "point.json"

Point = dict[str, Any]


class Failure(NamedTuple):
    """Why a rank stopped; of several, the one that stopped first (`at`, seconds) is the cause."""

    at: float
    error: str
    traceback: str


def join_tasks() -> None:
    """Let the tasks that submitit started for a point be its ranks, as torchrun's processes are."""
    from submitit.helpers import TorchDistributedEnvironment

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)  # every rank takes its own by number


def run_point(cfg: Config, number: int, overrides: Sequence[str]) -> float | None:
    """Train a point unless it is done, on all ranks; its objective, None if it failed. Raises UserError as `check`."""
    from compiler_trainer.ranks import (
        from_rank_0,
        gather,
        rank,
        start_ranks,
    )  # here, for `check` must not wait for torch
    from compiler_trainer.sweep import row, table
    from passes.torch_private import cache_hits

    start_ranks()
    done = from_rank_0(lambda: check(cfg))
    if done is not None:
        return done["objective"]
    if rank() == 0:
        print(f"point {number}: {' '.join(overrides)}", flush=True)
        begin(cfg, number, overrides)
    began, hits = time.perf_counter(), cache_hits()
    objective, failure = attempt(cfg)
    start_ranks()
    cause = min((f for f in gather(failure) if f is not None), default=None)
    if rank() == 0:
        spent = {"wall_s": round(time.perf_counter() - began, 3), "compile_cache_hits": cache_hits() - hits}
        result = {**row.measured(Path(cfg.run.dir), cfg), **spent}
        end(Path(cfg.run.dir), objective, cause, result)
        table.write(Path(cfg.run.dir).parent)
        print(f"point {number}: {cause.error if cause else 'done'}", flush=True)
    return None if cause else objective


def check(cfg: Config) -> Point | None:
    """The point in `cfg`'s folder if it is done; raises UserError if that folder holds another point or a plain run."""
    folder = Path(cfg.run.dir)
    found = read(folder)
    if found is None:
        if folder.exists() and any(folder.iterdir()):
            raise UserError("run.dir", f"{folder} is there already and is no point of a sweep; choose another folder")
        return None
    here, there = identity(cfg), found["config"]
    if differ := [name for name in {**there, **here} if here.get(name) != there.get(name)]:
        was, name = there.get(differ[0]), differ[0]
        fix = "choose another folder, or start the sweep with the options it had"
        raise UserError("run.dir", f"{folder} holds a point with {name}={was}, not {here.get(name)}; {fix}")
    return found if found["status"] == "done" else None


def attempt(cfg: Config) -> tuple[float | None, Failure | None]:
    """Train; the objective, or why there is none, with this rank out of its process group."""
    from compiler_trainer.ranks import stop_ranks
    from compiler_trainer.trainer import train

    objective = failure = None
    try:
        objective = train(cfg)
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        failure = Failure(time.time(), " ".join(text.split()), traceback.format_exc())
    stop_ranks()
    gc.collect()  # a group that nothing holds closes its connections, which ends the ranks that wait for this one
    return objective, failure


def begin(cfg: Config, number: int, overrides: Sequence[str]) -> None:
    """Make the point's folder anew."""
    from compiler_trainer.sweep import row

    folder = Path(cfg.run.dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    asked = {"overrides": row.parsed(overrides), "config": identity(cfg), "environment": row.environment()}
    write(folder, {"point": number, "status": "running", "started": started, **asked})


def end(folder: Path, objective: float | None, cause: Failure | None, result: dict[str, Any]) -> None:
    """Record what came of a point."""
    found = read(folder)
    assert found is not None
    status = {"status": "failed" if cause else "done", "objective": None if cause else objective}
    why = {"error": cause.error, "traceback": cause.traceback} if cause else {}
    write(folder, {**found, **status, **why, "result": result})


def identity(cfg: Config) -> dict[str, Any]:
    """The options of a point by dotted name, as they read in JSON; where it is stored is none of them."""
    options = flat(json.loads(json.dumps(dataclasses.asdict(cfg))))
    del options["run.dir"]
    return options


def flat(options: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{where}.{key}" if where else key
        found |= flat(value, name) if isinstance(value, dict) and value else {name: value}
    return found


def read(folder: Path) -> Point | None:
    """The point in a folder, None if there is none."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write(folder: Path, point: Point) -> None:
    """Put a point's file in place, on disk when this returns."""
    partial = folder / f"{FILE}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(point, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / FILE)
