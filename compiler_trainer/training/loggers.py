"""Loggers: the console, files in the run folder, services, and user-defined loggers.

The console shows a line that updates itself on a terminal, or a plain line at intervals without one. An outage of a
service neither stops the run nor loses records: it is reported once, and they are sent later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from compiler_trainer.config.errors import RunError, UserError, one_line
from compiler_trainer.config.files import write_atomically
from compiler_trainer.config.options import flat, tables
from compiler_trainer.config.schema import Config
from compiler_trainer.config.targets import called
from compiler_trainer.console import Renewed, say
from compiler_trainer.step.ranks import rank
from compiler_trainer.training.metrics import JsonLines, Record, TensorBoard

LINES = 10  # plain lines of a quick run
LINE_EVERY_S = 30.0  # between plain lines of a slow run
WORKING_EVERY_S = 2.0  # at most, during preparation
CONTENTS = {
    "config.yaml": "the options, resolved",
    "metrics.jsonl": "one JSON object a step",
    "events.out.tfevents.*": "the same for TensorBoard",
    "status.json": "what the run does now",
    "samples.jsonl": "what the model added to eval.prompts, or to data.prompts",
    "graphs/": "the graph after each pass, and the pass's report",
    "checkpoints/": "parameters, moments, step and data state",
    "reference.npz": "log-probabilities of preference pairs before training",
    "pipeline.txt": "which task each pipeline rank runs when; edit it for passes.pipeline.schedule",
    "report.json": "compile times, communication and memory; of a dry run the prediction",
    "trace.json.gz": "steps of rank 0, for Perfetto",
    "measured.json": "the time breakdown of each rank in these steps, for compiler-trainer profile",
    "plan.yaml": "the job file that trains the best of a plan",
    "plan.json": "a plan and the alternatives it was preferred to",
    "plan.html": "the same as a page",
}


class Progress(Renewed):
    """A context manager that shows steps `done` to `steps`, with the metrics `names`."""

    def __init__(self, steps: int, done: int = 0, names: Sequence[str] = ()):
        super().__init__(BarColumn(), TextColumn("{task.description}"))
        self.steps, self.taken, self.names = steps, 0, names
        self.lines = done * LINES // steps
        self.evaluated: tuple[int, float] | None = None  # the step, and the validation loss after it
        self.task = self.bar.add_task("", total=steps, completed=done)

    def show(self, record: Record) -> None:
        """Update the line, or print a plain one after each tenth of the run or half minute."""
        step = int(record["step"])
        self.taken += 1
        if "eval_loss" in record:
            self.evaluated = step, record["eval_loss"]
        if self.console.is_terminal:
            self.bar.update(self.task, completed=step, description=self.line(record))
        elif self.is_due(step):
            say(self.line(record))

    def line(self, record: Record) -> str:
        """Return `step 20/150  loss 3.412  eval loss 3.5 (step 15)  norm 0.81  lr 3e-04  1,234 tokens/s  1:05 left`."""
        step = int(record["step"])
        elapsed = time.monotonic() - self.started
        left = timedelta(seconds=round(elapsed / max(1, self.taken) * (self.steps - step)))
        evaluated = ""
        if self.evaluated is not None:
            at, eval_loss = self.evaluated
            evaluated = f"  eval loss {eval_loss:.3f}" + (f" (step {at})" if at != step else "")
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
        speed += f"  {record['images_per_s']:,.1f} images/s" if "images_per_s" in record else ""
        mfu = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
        update = f"norm {record.get('grad_norm', nan):.3g}  lr {record['lr']:.2g}"
        loss = record.get("loss", nan)
        metrics = "".join(f"  {name} {record[name]:.3f}" for name in self.names if name in record)
        return f"step {step}/{self.steps}  loss {loss:.3f}{metrics}{evaluated}  {update}  {speed}{mfu}  {left} left"

    def is_due(self, step: int) -> bool:
        """Return True if it is time for a plain line."""
        lines, now = step * LINES // self.steps, time.monotonic()
        if lines == self.lines and now - self.last_line < LINE_EVERY_S:
            return False
        self.lines, self.last_line = lines, now
        return True


class Working(Renewed):
    """A context manager that shows the current preparation task and its duration; call it with each new task.

    On a terminal it is one line that updates itself; otherwise it prints lines at growing intervals.
    """

    def __init__(self, to: TextIO | None = None) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        super().__init__(*columns, to=to, transient=True)
        self.to = to
        self.task = self.bar.add_task("")

    def __call__(self, task: str) -> None:
        """Show the task that begins now."""
        now = time.monotonic()
        if self.console.is_terminal:
            self.bar.update(self.task, description=task)
        elif now - self.last_line >= max(WORKING_EVERY_S, (now - self.started) / LINES):
            self.last_line = now
            say(f"  {now - self.started:.0f} s: {task}", self.to)


def announce(text: str) -> None:
    """Print a line at once, on rank 0 only."""
    if rank() == 0:
        say(text)


def say_contents(folder: Path) -> None:
    """Print the run folder's path and contents."""
    say(f"{folder}:")
    for pattern, content in CONTENTS.items():
        if any(folder.glob(pattern)):
            say(f"  {pattern:<22} {content}")


def say_next(cfg: Config) -> None:
    """Print on rank 0 the commands for a finished run, with `--chat` for chats."""
    quoted = shlex.quote(cfg.run.dir)
    verbs = [f"generate {quoted} --prompt TEXT{' --chat' * cfg.data.chat}"] if cfg.head == "lm" else []
    verbs += [] if cfg.has_rollouts else [f"eval {quoted}"]
    for number, verb in enumerate([*verbs, f"export {quoted} FOLDER"]):
        announce(f"{'      ' if number else 'next: '}compiler-trainer {verb}")


# ---- files, services and loggers of the user's ---------------------------------------------------------

AGAIN_S = 30.0  # until records that were refused are sent again
LONGEST = 500  # characters of a parameter that every MLflow server accepts
AT_ONCE = 100  # parameters that MLflow accepts in one call


class Logger(Protocol):
    """The interface of loggers, which take the records of a run on rank 0."""

    def start(self, cfg: Config, done: int) -> None:
        """Start, or resume after step `done`; `cfg` are the options, and the run folder `cfg.run.dir` exists."""

    def log(self, record: Record) -> None:
        """Take the `record` of one step: its number `step` and its finite values; after a rollback steps come again."""

    def close(self, failed: bool) -> None:
        """Finish; `failed` is True if an error ended the run."""


class WandB:
    """Weights & Biases, online, or with `mode="offline"` into the run folder, for `wandb sync`.

    Args:
        project: the project of the runs.
        arguments: arguments of `wandb.init`.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(self, project: str = "compiler-trainer", **arguments: Any):
        self.wandb, self.arguments = import_optional("wandb", "wandb"), {"project": project, **arguments}

    def start(self, cfg: Config, done: int) -> None:
        """Start a run, or resume the one that an earlier part of this run started."""
        folder = Path(cfg.run.dir)
        name = run_id(folder / "wandb.id", done, lambda: secrets.token_hex(4))
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
    """MLflow, on a server or, with the full package mlflow, in a database.

    Args:
        tracking_uri: the address of a server, or a database such as `sqlite:///mlflow.db`; None: MLFLOW_TRACKING_URI.
        experiment: the experiment of the runs, which is created if there is none of this name.

    Raises:
        UserError: mlflow is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "compiler-trainer"):
        self.mlflow, self.tracking_uri, self.experiment = import_optional("mlflow", "mlflow"), tracking_uri, experiment

    def start(self, cfg: Config, done: int) -> None:
        """Start a run with the options as its parameters, or resume the one that this folder's earlier part started."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the default blocks training for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self.client = self.mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        self.id = run_id(Path(cfg.run.dir) / "mlflow.id", done, lambda: self.begin(cfg))
        self.client.update_run(self.id, status="RUNNING")

    def begin(self, cfg: Config) -> str:
        """Create a run and return its id."""
        existing = self.client.get_experiment_by_name(self.experiment)
        experiment = existing.experiment_id if existing else self.client.create_experiment(self.experiment)
        run = self.client.create_run(experiment, run_name=Path(cfg.run.dir).name).info.run_id
        options = flat(dataclasses.asdict(cfg), set(tables(cfg)))
        params = [self.mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in options.items()]
        for first in range(0, len(params), AT_ONCE):
            self.client.log_batch(run, params=params[first : first + AT_ONCE])
        return run

    def log(self, record: Record) -> None:
        """Send all values of a step in one call."""
        now, step = int(1000 * time.time()), int(record["step"])
        values = [(metric_name(name), value) for name, value in record.items() if name != "step"]
        metrics = [self.mlflow.entities.Metric(name, float(value), now, step) for name, value in values]
        self.client.log_batch(self.id, metrics=metrics)

    def close(self, failed: bool) -> None:
        """Set the run's final status."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def import_optional(module: str, package: str) -> ModuleType:
    """Return an optional module; raise UserError with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise UserError("run.loggers", f"{module} is not installed; pip install {package}") from error


def run_id(path: Path, done: int, begin: Callable[[], str]) -> str:
    """Return a service's id of this run: from the file of its earlier part, or a new one if the run begins."""
    if not (done and path.exists()):
        write_atomically(path, begin() + "\n")
    return path.read_text().strip()


def metric_name(name: str) -> str:
    """Return a metric's name in the characters that MLflow accepts, as a path without empty parts."""
    return posixpath.normpath(re.sub(r"[^\w\-. :/]", "_", name).replace("../", "_/")).strip("/")


class RetryingLogger:
    """A logger whose service may be unreachable: an outage is reported once, and its records are sent later."""

    def __init__(self, logger: Logger):
        self.logger, self.pending, self.failure, self.next = logger, list[Record](), "", 0.0

    def start(self, cfg: Config, done: int) -> None:
        """Start the logger; raise RunError if that fails."""
        try:
            self.logger.start(cfg, done)
        except Exception as error:
            problem = (
                f"{type(error).__name__}: {one_line(error)[:300]}; fix it, or remove it from run.loggers"
            )
            raise RunError(f"run.loggers: {type(self.logger).__name__} cannot start: {problem}") from error

    def log(self, record: Record) -> None:
        """Keep a record, and send all kept ones unless the last failure was less than `AGAIN_S` ago."""
        self.pending.append(record)
        if time.monotonic() >= self.next:
            self.send()

    def send(self) -> None:
        """Send the kept records in order, as far as the service accepts them."""
        previous, self.failure = self.failure, ""
        try:
            while self.pending:
                self.log_first()
                del self.pending[0]
        except Exception as error:
            self.failure = f"{type(error).__name__}: {one_line(error)}"
            self.next = time.monotonic() + AGAIN_S
        name = type(self.logger).__name__
        if self.failure and not previous:
            say(f"{name} does not accept metrics ({self.failure[:200]}): they are kept and sent again later")
        if previous and not self.failure:
            say(f"{name} accepts metrics again, none is missing")

    def log_first(self) -> None:
        """Send the first kept record; one that the logger cannot take, now or later, is dropped and reported."""
        try:
            self.logger.log(self.pending[0])
        except (LookupError, TypeError, AttributeError) as error:
            step, name = int(self.pending[0]["step"]), type(self.logger).__name__
            say(f"{name} cannot take the metrics of step {step:,} ({type(error).__name__}: {one_line(error)[:200]})")

    def close(self, failed: bool) -> None:
        """Send a last time, and report the records that are lost."""
        if self.pending:
            self.send()
        if self.pending:
            say(f"{type(self.logger).__name__} lacks the last {len(self.pending):,} steps: {self.failure[:200]}")
        try:
            self.logger.close(failed)
        except Exception as error:
            say(f"{type(self.logger).__name__} was not notified that the run ended: {type(error).__name__}: {error}")


def build_loggers(cfg: Config) -> list[Logger]:
    """Return all loggers of a run; raise UserError for an invalid logger or a package that is not installed."""
    loggers: list[Logger] = [JsonLines(), TensorBoard()]
    for number, target in enumerate(cfg.run.loggers):
        logger = called(target, place := f"run.loggers[{number}]")
        if absent := [name for name in ("start", "log", "close") if not hasattr(logger, name)]:
            raise UserError(
                place, f"{target['_target_']} returns an object without `{absent[0]}`; it needs start, log and close"
            )
        loggers.append(RetryingLogger(logger))
    return loggers


@contextlib.contextmanager
def logging(
    cfg: Config, done: int, loggers: Sequence[Logger], names: Sequence[str] = ()
) -> Iterator[Callable[[Record], None]]:
    """Yield a function that takes each step's record: rank 0 passes it to loggers and console, other ranks ignore it.

    Loggers are started before and closed afterwards. `names` are the metrics that the console shows next to the loss.
    """
    if rank() != 0:
        yield lambda record: None
        return
    started, failed = list[Logger](), True
    try:
        for logger in loggers:
            logger.start(cfg, done)
            started.append(logger)
        with Progress(cfg.train.steps, done, names) as progress:

            def log(record: Record) -> None:
                for logger in loggers:
                    logger.log(record)
                progress.show(record)

            yield log
        failed = False
    finally:
        for logger in started:
            logger.close(failed)
    say_contents(Path(cfg.run.dir))
