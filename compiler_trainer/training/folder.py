"""The run folder: made once nothing can be refused any more, so that a bad input leaves none behind."""

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
from compiler_trainer.config.files import put
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say
from compiler_trainer.training import metrics
from compiler_trainer.training.resume import BY_NAME, checkpoints_of
from passes.check.runner import Dumper, PassRecord
from passes.pipeline.tables import Table, as_text
from passes.program import ir

NOTHING_YET = "begin it anew with checkpoint.resume=auto: it has no checkpoint yet"
CONFIG, REPORT, GRAPHS, PIPELINE = "config.yaml", "report.json", "graphs", "pipeline.txt"


def check(cfg: Config, resumed: Path | None, done: int) -> None:
    """Raise UserError where a run that has `done` steps behind it would write over another one, or cannot write."""
    folder, checkpoints = Path(cfg.run.dir), checkpoints_of(cfg)
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError("run.dir", f"{folder} is not a folder; choose another name")
    check_places(folder)
    goes_on_here = resumed is not None and resumed.resolve().parent == checkpoints.resolve()
    starts_again = resumed is None and cfg.checkpoint.resume == "auto"
    if (folder / metrics.FILE).exists() and not goes_on_here and not starts_again:
        goes_on = "go on with checkpoint.resume=latest" if checkpoint.complete(checkpoints) else NOTHING_YET
        raise UserError("run.dir", f"{folder} holds a run; choose another, or {goes_on}")
    if (folder / metrics.FILE).exists():
        metrics.read(folder / metrics.FILE)  # before anything is written
    ahead = [p for p in checkpoint.complete(checkpoints) if checkpoint.number_of(p) > done]
    if cfg.checkpoint.saves and ahead and cfg.checkpoint.resume not in BY_NAME:  # else what is ahead is damaged
        fix = "move it away, choose another checkpoint.dir, or go on with checkpoint.resume=latest"
        raise UserError("checkpoint.dir", f"{ahead[-1]} is ahead of this run, which starts after step {done}; {fix}")
    check_writable("run.dir", folder)
    if cfg.checkpoint.saves:
        check_writable("checkpoint.dir", checkpoints)


def check_places(folder: Path) -> None:
    """Raise UserError where what a run writes has something else in its place: a pipe, a folder, a broken link."""
    for name in (CONFIG, REPORT, PIPELINE, metrics.FILE):
        if os.path.lexists(folder / name) and not (folder / name).is_file():
            raise UserError(str(folder / name), "is not a file; move it away")
    if os.path.lexists(folder / GRAPHS) and not (folder / GRAPHS).is_dir():
        raise UserError(str(folder / GRAPHS), "is not a folder; move it away")


def check_writable(option: str, folder: Path) -> None:
    """Raise UserError unless files can be made in a folder, or where it would be made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise UserError(option, f"{folder} cannot be written: {error.strerror}; choose another") from error


def create(cfg: Config, report: dict[str, Any], table: Table | None = None) -> None:
    """Make the folder, with the config, the report of the compilation, and the schedule of pipeline stages if any."""
    folder = Path(cfg.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    stored = report.get("program", {}).get("stored_as")
    config.save(cfg, folder / CONFIG, f"# program {stored}\n" if stored else "")
    put(folder / REPORT, json.dumps(report, indent=1) + "\n")
    if table is not None:
        put(folder / PIPELINE, as_text(table))
    else:  # of a run that goes on without stages
        (folder / PIPELINE).unlink(missing_ok=True)


class Dumps:
    """Dumps the graph after each pass into a folder; once its disk takes no more, that is said, and none is left."""

    def __init__(self, folder: Path):
        self.folder, self.dump, self.is_on = folder, Dumper(folder), True
        folder.mkdir()

    def __call__(self, program: ir.Program, record: PassRecord) -> None:
        """Dump a stage."""
        if not self.is_on:
            return
        try:
            self.dump(program, record)
        except OSError as error:
            self.is_on = False
            shutil.rmtree(self.folder, ignore_errors=True)  # a part would be taken for the whole
            say(f"{self.folder} cannot be written ({error.strerror}): the graphs are left out")


@contextmanager
def graphs_of(cfg: Config) -> Iterator[Dumps | None]:
    """Dumps graphs, which are in the run's `graphs/` in the end unless the block refuses the input; None if not wanted.

    When the block fails in another way, or is interrupted, the graphs up to there are kept, for they tell why, with
    what `inspect` and `resume` need.
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
            with suppress(OSError):
                begin(cfg)
            raise
        keep(dumps, Path(cfg.run.dir, GRAPHS))


def begin(cfg: Config) -> None:
    """Make the folder of a run that was not compiled, where it is not there from an earlier part."""
    if not os.path.lexists(Path(cfg.run.dir, CONFIG)):
        create(cfg, {})


def keep(dumps: Dumps, place: Path) -> None:
    """Move the dumped graphs to their place, over those of an earlier part of the run; where that fails say so."""
    if not dumps.is_on:
        return
    try:
        remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(dumps.folder, place)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(place, ignore_errors=True)  # a part would be taken for the whole
        why = error.strerror if isinstance(error, OSError) and error.strerror else os.strerror(errno.ENOSPC)
        say(f"{place} cannot be written ({why}): the graphs are left out")
