"""What a run says on the console: a line that renews itself, or now and then a plain one where there is no terminal."""

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

LINES = 10  # plain ones in a run, if it is quick
LINE_EVERY_S = 30.0  # if it is not
WORKING_EVERY_S = 2.0  # at most, while something is made ready
CONTENTS = {
    "config.yaml": "the options, resolved",
    "metrics.jsonl": "one JSON object a step",
    "events.out.tfevents.*": "the same for TensorBoard",
    "samples.jsonl": "what the model added to eval.prompts",
    "graphs/": "the graph after each pass, and the pass's report",
    "checkpoints/": "parameters, moments, step and data state",
    "reference.npz": "log-probabilities of preference pairs before training",
    "pipeline.txt": "which task each pipeline rank runs when; edited, for passes.pipeline.schedule",
    "report.json": "compile times, communication and memory; of a dry run the prediction",
    "trace.json.gz": "steps of rank 0, for Perfetto",
    "measured.json": "where the time of each rank went in these steps, for compiler-trainer profile",
    "plan.yaml": "the recipe that trains the best of a plan",
    "plan.json": "a plan, and what lost against it",
    "plan.html": "the same as a page",
}


class Progress(Renewed):
    """Shows steps `done` to `steps`, with metrics of some names; used as a context manager."""

    def __init__(self, steps: int, done: int = 0, names: Sequence[str] = ()):
        super().__init__(BarColumn(), TextColumn("{task.description}"))
        self.steps, self.first, self.names = steps, done, names
        self.lines = done * LINES // steps
        self.evaluated: tuple[int, float] | None = None  # the step, and the held-out loss after it
        self.task = self.bar.add_task("", total=steps, completed=done)

    def show(self, record: Record) -> None:
        """Renew the line, or print one where a tenth of the run or half a minute has passed."""
        step = int(record["step"])
        if "eval_loss" in record:
            self.evaluated = step, record["eval_loss"]
        if self.console.is_terminal:
            self.bar.update(self.task, completed=step, description=self.line(record))
        elif self.is_due(step):
            say(self.line(record))

    def line(self, record: Record) -> str:
        """`step 20/150  loss 3.412  eval loss 3.500 (step 15)  norm 0.81  lr 3.0e-04  12,345 tokens/s  1:05 left`."""
        step = int(record["step"])
        elapsed = time.monotonic() - self.started
        left = timedelta(seconds=round(elapsed / (step - self.first) * (self.steps - step)))
        evaluated = ""
        if self.evaluated is not None:
            at, held_out = self.evaluated
            evaluated = f"  eval loss {held_out:.3f}" + (f" (step {at})" if at != step else "")
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
        used = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
        update = f"norm {record.get('grad_norm', nan):.3g}  lr {record['lr']:.2g}"
        loss = record.get("loss", nan)
        metrics = "".join(f"  {name} {record[name]:.3f}" for name in self.names if name in record)
        return f"step {step}/{self.steps}  loss {loss:.3f}{metrics}{evaluated}  {update}  {speed}{used}  {left} left"

    def is_due(self, step: int) -> bool:
        """Whether it is time for a plain line."""
        lines, now = step * LINES // self.steps, time.monotonic()
        if lines == self.lines and now - self.last_line < LINE_EVERY_S:
            return False
        self.lines, self.last_line = lines, now
        return True


class Working(Renewed):
    """Shows what is being done and for how long, where there are no steps; used as a context manager, and called.

    On a terminal one line that renews itself, else a line now and then, the later the more seldom.
    """

    def __init__(self, to: TextIO | None = None) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        super().__init__(*columns, to=to, transient=True)
        self.to = to
        self.task = self.bar.add_task("")

    def __call__(self, what: str) -> None:
        """Say what begins now."""
        now = time.monotonic()
        if self.console.is_terminal:
            self.bar.update(self.task, description=what)
        elif now - self.last_line >= max(WORKING_EVERY_S, (now - self.started) / LINES):
            self.last_line = now
            say(f"  {now - self.started:.0f} s: {what}", self.to)


def announce(text: str) -> None:
    """Print a line at once, on rank 0 alone."""
    if rank() == 0:
        say(text)


def say_contents(folder: Path) -> None:
    """Print where the run folder is and what is in it."""
    say(f"{folder}:")
    for pattern, what in CONTENTS.items():
        if any(folder.glob(pattern)):
            say(f"  {pattern:<22} {what}")


def say_next(run: str, chat: bool) -> None:
    """Print on rank 0 what can be done with a run that has ended, of chats or of other text."""
    quoted = shlex.quote(run)
    announce(f"next: compiler-trainer generate {quoted} --prompt TEXT{' --chat' * chat}")
    announce(f"      compiler-trainer eval {quoted}")
    announce(f"      compiler-trainer export {quoted} FOLDER")
