"""One point of a sweep: run once, recorded whatever happens, skipped once it is done."""

from __future__ import annotations

import gc
import math
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.step.ranks import from_rank_0, gather, rank, start_ranks, stop_ranks
from compiler_trainer.sweep import row, table
from compiler_trainer.sweep.stored import check, identity, read, write
from compiler_trainer.training.checkpoints import BY_NAME
from passes.lower.inductor import counts

Outcome = Callable[[Config], float]  # trains one job and returns its final loss


class Failure(NamedTuple):
    """The error that stopped a rank; of several, the first one (`at`, seconds) is the cause."""

    at: float
    error: str
    traceback: str


def join_tasks() -> None:
    """Make the tasks that submitit started for a point its ranks, like torchrun's processes."""
    from submitit.helpers import TorchDistributedEnvironment  # of the extra `sweep`

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)  # every rank selects its own by number


def run_point(cfg: Config, number: int, overrides: Sequence[str], outcome: Outcome) -> float | None:
    """Train a point on all ranks unless it is done; return its objective, None if it failed.

    Raises UserError as `check` does.
    """
    start_ranks()
    done = from_rank_0(lambda: check(cfg))
    if done is not None:
        return done["objective"]
    if rank() == 0:
        print(f"point {number}: {' '.join(overrides)}", flush=True)
        begin(cfg, number, overrides)
    began, loaded = time.perf_counter(), counts["loaded"]
    objective, failure = attempt(cfg, outcome)
    start_ranks()
    cause = min((f for f in gather(failure) if f is not None), default=None)
    if rank() == 0:
        cost = {"wall_s": round(time.perf_counter() - began, 3), "compile_cache_hits": counts["loaded"] - loaded}
        result = {**row.measured(Path(cfg.run.dir)), **cost}
        end(Path(cfg.run.dir), objective, cause, result)
        table.write(Path(cfg.run.dir).parent)
        print(f"point {number}: {cause.error if cause else 'done'}", flush=True)
    return None if cause else objective


def attempt(cfg: Config, outcome: Outcome) -> tuple[float | None, Failure | None]:
    """Train; return (objective, None) or (None, failure), with this rank out of its process group."""
    objective = failure = None
    try:
        objective = outcome(cfg)
        objective = objective if math.isfinite(objective) else None  # no number for JSON
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        failure = Failure(time.time(), " ".join(text.split()), traceback.format_exc())
    stop_ranks()
    gc.collect()  # an unreferenced group closes its connections, which ends ranks that wait for this one
    return objective, failure


def begin(cfg: Config, number: int, overrides: Sequence[str]) -> None:
    """Create the point's folder: from scratch, unless the point may resume from its checkpoints."""
    folder = Path(cfg.run.dir)
    if cfg.checkpoint.resume not in BY_NAME:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    job = {"overrides": row.parsed(overrides), "config": identity(cfg), "environment": row.environment()}
    write(folder, {"point": number, "status": "running", "started": started, **job})


def end(folder: Path, objective: float | None, cause: Failure | None, result: dict[str, Any]) -> None:
    """Record the outcome of a point."""
    point = read(folder)
    assert point is not None
    status = {"status": "failed" if cause else "done", "objective": None if cause else objective}
    error = {"error": cause.error, "traceback": cause.traceback} if cause else {}
    write(folder, {**point, **status, **error, "result": result})
