"""The run folder, created only when nothing can be refused any more, so that bad input leaves no folder behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint.listing import remove
from compiler_trainer.config import schema as config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import write_atomically
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.training import metrics
from compiler_trainer.training.checkpoints import BY_NAME, checkpoints_of, snapshots_of
from passes.check.runner import Dumper, PassRecord
from passes.ir import ir
from passes.pipeline.schedules import Schedule, as_text

NOTHING_YET = "restart it with checkpoint.resume=auto: it has no checkpoint yet"
CONFIG, REPORT, GRAPHS, PIPELINE = "config.yaml", "report.json", "graphs", "pipeline.txt"


def check(cfg: Config, resumed: Path | None, done: int) -> None:
    """Raise UserError if a run with `done` steps behind it would overwrite another run, or cannot write its folders."""
    folder, checkpoints = Path(cfg.run.dir), checkpoints_of(cfg)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError("run.dir", f"{folder} is not a folder; choose another name")
    check_places(folder)
    here = [folder.resolve() for folder in (checkpoints, snapshots_of(cfg)) if folder is not None]
    resumes_here = resumed is not None and resumed.resolve().parent in here
    restarts = resumed is None and cfg.checkpoint.resume == "auto"
    if (folder / metrics.FILE).exists() and not resumes_here and not restarts:
        advice = "resume with checkpoint.resume=latest" if checkpoint.complete(checkpoints) else NOTHING_YET
        raise UserError("run.dir", f"{folder} contains a run; choose another folder, or {advice}")
    if (folder / metrics.FILE).exists():
        metrics.read(folder / metrics.FILE)  # raises for a damaged file before anything is written
    later = [p for p in checkpoint.complete(checkpoints) if checkpoint.number_of(p) > done]
    if cfg.checkpoint.saves and later and cfg.checkpoint.resume not in BY_NAME:  # otherwise they are damaged
        fix = "move it away, choose another checkpoint.dir, or resume with checkpoint.resume=latest"
        raise UserError("checkpoint.dir", f"{later[-1]} is ahead of this run, which starts after step {done}; {fix}")
    check_writable("run.dir", folder)
    if cfg.checkpoint.saves:
        check_writable("checkpoint.dir", checkpoints)


def check_places(folder: Path) -> None:
    """Raise UserError if the path of a file that a run writes is taken: by a pipe, a folder or a broken link."""
    for name in (CONFIG, REPORT, PIPELINE, metrics.FILE):
        if os.path.lexists(folder / name) and not (folder / name).is_file():
            raise UserError(str(folder / name), "is not a file; move it away")
    if os.path.lexists(folder / GRAPHS) and not (folder / GRAPHS).is_dir():
        raise UserError(str(folder / GRAPHS), "is not a folder; move it away")


def check_writable(option: str, folder: Path) -> None:
    """Raise UserError if no files can be created in a folder, or in its nearest existing parent."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise UserError(option, f"{folder} cannot be written: {error.strerror}; choose another") from error


def create(cfg: Config, report: dict[str, Any], schedule: Schedule | None = None) -> None:
    """Create the folder with the config, the compilation report, and the pipeline schedule if there is one."""
    folder = Path(cfg.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    program_key = report.get("program", {}).get("stored_as")
    config.save(cfg, folder / CONFIG, f"# program {program_key}\n" if program_key else "")
    write_atomically(folder / REPORT, json.dumps(report, indent=1) + "\n")
    if schedule is not None:
        write_atomically(folder / PIPELINE, as_text(schedule))
    else:  # left by an earlier part of the run that had stages
        (folder / PIPELINE).unlink(missing_ok=True)


class Dumps:
    """A writer of the graph after each pass; if the disk refuses, it prints a message and removes all graphs."""

    def __init__(self, folder: Path):
        self.folder, self.dump, self.is_on = folder, Dumper(folder), True
        folder.mkdir()

    def __call__(self, program: ir.Program, record: PassRecord) -> None:
        """Write the graph after one pass."""
        if not self.is_on:
            return
        try:
            self.dump(program, record)
        except OSError as error:
            self.is_on = False
            shutil.rmtree(self.folder, ignore_errors=True)  # an incomplete set would look complete
            say(f"{self.folder} cannot be written ({error.strerror}): no graphs are saved")


@contextmanager
def graphs_of(cfg: Config) -> Iterator[Dumps | None]:
    """Yield a writer of graphs, or None if they are not wanted; move the graphs to the run's `graphs/` at the end.

    If the block raises UserError, nothing is kept. After any other failure or an interruption, the graphs so far are
    kept because they show the cause, together with the files that `inspect` and `resume` need.
    """
    if not cfg.run.dump_graphs:
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        dumps = Dumps(Path(scratch, "graphs"))
        try:
            yield dumps
        except UserError:
            raise
        except BaseException:
            keep(dumps, Path(cfg.run.dir, GRAPHS))
            with suppress(OSError, UserError):  # the first error is the one to report
                begin(cfg)
            raise
        keep(dumps, Path(cfg.run.dir, GRAPHS))


def begin(cfg: Config) -> None:
    """Create the folder of a run whose compilation failed, unless an earlier part of the run created it."""
    if not os.path.lexists(Path(cfg.run.dir, CONFIG)):
        create(cfg, {})


def keep(dumps: Dumps, place: Path) -> None:
    """Move the graphs to their place, over those of an earlier part of the run; if that fails, print the reason."""
    if not dumps.is_on:
        return
    try:
        remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(dumps.folder, place)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(place, ignore_errors=True)  # an incomplete set would look complete
        reason = error.strerror if isinstance(error, OSError) and error.strerror else os.strerror(errno.ENOSPC)
        say(f"{place} cannot be written ({reason}): no graphs are saved")
