"""Console output of a run: a line that updates itself on a terminal, or a plain line at intervals without one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from math import nan
from pathlib import Path
from typing import TextIO

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from compiler_trainer.console import Renewed, say
from compiler_trainer.step.ranks import rank
from compiler_trainer.training.metrics import Record

LINES = 10  # plain lines of a quick run
LINE_EVERY_S = 30.0  # between plain lines of a slow run
WORKING_EVERY_S = 2.0  # at most, during preparation
CONTENTS = {
    "config.yaml": "the options, resolved",
    "metrics.jsonl": "one JSON object a step",
    "events.out.tfevents.*": "the same for TensorBoard",
    "samples.jsonl": "what the model added to eval.prompts",
    "graphs/": "the graph after each pass, and the pass's report",
    "checkpoints/": "parameters, moments, step and data state",
    "reference.npz": "log-probabilities of preference pairs before training",
    "pipeline.txt": "which task each pipeline rank runs when; edit it for passes.pipeline.schedule",
    "report.json": "compile times, communication and memory; of a dry run the prediction",
    "trace.json.gz": "steps of rank 0, for Perfetto",
    "measured.json": "the time breakdown of each rank in these steps, for compiler-trainer profile",
    "plan.yaml": "the recipe that trains the best of a plan",
    "plan.json": "a plan and the alternatives it was preferred to",
    "plan.html": "the same as a page",
}


class Progress(Renewed):
    """A context manager that shows steps `done` to `steps`, with the metrics `names`."""

    def __init__(self, steps: int, done: int = 0, names: Sequence[str] = ()):
        super().__init__(BarColumn(), TextColumn("{task.description}"))
        self.steps, self.first, self.names = steps, done, names
        self.lines = done * LINES // steps
        self.evaluated: tuple[int, float] | None = None  # the step, and the validation loss after it
        self.task = self.bar.add_task("", total=steps, completed=done)

    def show(self, record: Record) -> None:
        """Update the line, or print a plain one after each tenth of the run or half minute."""
        step = int(record["step"])
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
        left = timedelta(seconds=round(elapsed / (step - self.first) * (self.steps - step)))
        evaluated = ""
        if self.evaluated is not None:
            at, eval_loss = self.evaluated
            evaluated = f"  eval loss {eval_loss:.3f}" + (f" (step {at})" if at != step else "")
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
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


def say_next(run: str, chat: bool) -> None:
    """Print on rank 0 the commands for a finished run, with `--chat` for chats."""
    quoted = shlex.quote(run)
    announce(f"next: compiler-trainer generate {quoted} --prompt TEXT{' --chat' * chat}")
    announce(f"      compiler-trainer eval {quoted}")
    announce(f"      compiler-trainer export {quoted} FOLDER")
