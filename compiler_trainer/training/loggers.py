"""Loggers of metrics: files in the run folder, services, and user-defined loggers.

An outage of a service neither stops the run nor loses records: they are kept, reported once, and sent again later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from compiler_trainer.config.compose import flat
from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.files import put
from compiler_trainer.config.options import tables
from compiler_trainer.config.schema import Config
from compiler_trainer.config.targets import called
from compiler_trainer.console import say
from compiler_trainer.training.metrics import JsonLines, Record, TensorBoard

AGAIN_S = 30.0  # until records that were refused are sent again
LONGEST = 500  # characters of a parameter that every MLflow server accepts
AT_ONCE = 100  # parameters that MLflow accepts in one call


class Logger(Protocol):
    """The interface of loggers, which take the records of a run on rank 0."""

    def start(self, cfg: Config, done: int) -> None:
        """Start, or resume after step `done`; the run folder, `cfg.run.dir`, exists."""

    def log(self, record: Record) -> None:
        """Take one step: `record["step"]` and its finite values. After a rollback, steps are logged again."""

    def close(self, failed: bool) -> None:
        """Finish; `failed` is True if an error ended the run."""


class WandB:
    """Weights & Biases, online, or `offline` into the run folder for `wandb sync`; `arguments` are those of wandb.init.

    Raises UserError if wandb is not installed.
    """

    def __init__(self, project: str = "compiler-trainer", **arguments: Any):
        self.wandb, self.arguments = installed("wandb", "wandb"), {"project": project, **arguments}

    def start(self, cfg: Config, done: int) -> None:
        """Start a run, or resume the one that an earlier part of this run started."""
        folder = Path(cfg.run.dir)
        name = known_as(folder / "wandb.id", done, lambda: secrets.token_hex(4))
        options = {"id": name, "name": folder.name, "resume": "allow", "dir": str(folder)}
        self.run = self.wandb.init(config=dataclasses.asdict(cfg), **{**options, **self.arguments})
        self.run.define_metric("*", step_metric="step")  # a repeated step gets the later value

    def log(self, record: Record) -> None:
        """Pass the record to wandb's process, which sends it."""
        self.run.log(dict(record))

    def close(self, failed: bool) -> None:
        """Wait until all records are sent or written."""
        self.run.finish(exit_code=int(failed))


class MLflow:
    """MLflow: a server's address, or a database (`sqlite:///mlflow.db`, with full mlflow); None: MLFLOW_TRACKING_URI.

    Raises UserError if mlflow is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "compiler-trainer"):
        self.mlflow, self.tracking_uri, self.experiment = installed("mlflow", "mlflow"), tracking_uri, experiment

    def start(self, cfg: Config, done: int) -> None:
        """Start a run with the options as its parameters, or resume the one that this folder's earlier part started."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the default blocks training for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self.client = self.mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        self.id = known_as(Path(cfg.run.dir) / "mlflow.id", done, lambda: self.begin(cfg))
        self.client.update_run(self.id, status="RUNNING")

    def begin(self, cfg: Config) -> str:
        """Create a run and return its id."""
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        run = self.client.create_run(experiment, run_name=Path(cfg.run.dir).name).info.run_id
        options = flat(dataclasses.asdict(cfg), set(tables(cfg)))
        params = [self.mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in options.items()]
        for first in range(0, len(params), AT_ONCE):
            self.client.log_batch(run, params=params[first : first + AT_ONCE])
        return run

    def log(self, record: Record) -> None:
        """Send all values of a step in one call."""
        now, step = int(1000 * time.time()), int(record["step"])
        values = [(accepted(name), value) for name, value in record.items() if name != "step"]
        metrics = [self.mlflow.entities.Metric(name, float(value), now, step) for name, value in values]
        self.client.log_batch(self.id, metrics=metrics)

    def close(self, failed: bool) -> None:
        """Set the run's final status."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def installed(module: str, package: str) -> ModuleType:
    """Return an optional module; raise UserError with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise UserError("run.loggers", f"{module} is not installed; pip install {package}") from error


def known_as(path: Path, done: int, begin: Callable[[], str]) -> str:
    """Return a service's id of this run: from the file of its earlier part, or a new one if the run begins."""
    if not (done and path.exists()):
        put(path, begin() + "\n")
    return path.read_text().strip()


def accepted(name: str) -> str:
    """Return a metric's name in the characters that MLflow accepts, as a path without empty parts."""
    return posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name).replace("../", "_/")).strip("/")


class Kept:
    """A logger whose service may be unreachable: records are kept, the outage is reported once, and sent later."""

    def __init__(self, logger: Logger):
        self.logger, self.kept, self.failure, self.next = logger, list[Record](), "", 0.0

    def start(self, cfg: Config, done: int) -> None:
        """Start the logger; raise RunError if that fails."""
        try:
            self.logger.start(cfg, done)
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; mend it, or leave it out"
            raise RunError(f"run.loggers: {type(self.logger).__name__} cannot start: {said}") from error

    def log(self, record: Record) -> None:
        """Keep a record, and send all kept ones unless the last failure was less than `AGAIN_S` ago."""
        self.kept.append(record)
        if time.monotonic() >= self.next:
            self.send()

    def send(self) -> None:
        """Send the kept records in order, as far as the service accepts them."""
        before, self.failure = self.failure, ""
        try:
            while self.kept:
                self.logger.log(self.kept[0])
                del self.kept[0]
        except Exception as error:
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self.next = time.monotonic() + AGAIN_S
        name = type(self.logger).__name__
        if self.failure and not before:
            say(f"{name} takes no metrics ({self.failure[:200]}): they are kept, and tried again")
        if before and not self.failure:
            say(f"{name} takes metrics again, none is missing")

    def close(self, failed: bool) -> None:
        """Send a last time, and report the records that are lost."""
        if self.kept:
            self.send()
        if self.kept:
            say(f"{type(self.logger).__name__} lacks the last {len(self.kept):,} steps: {self.failure[:200]}")
        try:
            self.logger.close(failed)
        except Exception as error:
            say(f"{type(self.logger).__name__} was not told that the run ended: {type(error).__name__}: {error}")


def build_loggers(cfg: Config) -> list[Logger]:
    """Return all loggers of a run; raise UserError for an invalid logger or a package that is not installed."""
    found: list[Logger] = [JsonLines(), TensorBoard()]
    for number, own in enumerate(cfg.run.loggers):
        logger = called(own, where := f"run.loggers[{number}]")
        if missing := [name for name in ("start", "log", "close") if not hasattr(logger, name)]:
            raise UserError(where, f"{own['_target_']} makes what has no `{missing[0]}`; it needs start, log and close")
        found.append(Kept(logger))
    return found


@contextlib.contextmanager
def logging(cfg: Config, done: int, loggers: Sequence[Logger]) -> Iterator[Callable[[Record], None]]:
    """Start the loggers, yield a function that logs a record, and close them at the end."""
    begun, failed = list[Logger](), True

    def log(record: Record) -> None:
        for logger in loggers:
            logger.log(record)

    try:
        for logger in loggers:
            logger.start(cfg, done)
            begun.append(logger)
        yield log
        failed = False
    finally:
        for logger in begun:
            logger.close(failed)
