"""Tokenize the pieces of a corpus in several processes, which end together with this one, and show the progress."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn

from compiler_trainer.config.errors import UserError
from compiler_trainer.console import Renewed, say
from compiler_trainer.data.readers import Span
from compiler_trainer.data.worker import Recipe, Worker

ROOT = Path(__file__).parents[2]
ALONE = 2  # pieces that one process finishes before others would have started


class Failure(NamedTuple):
    """The failed piece with the lowest number, and its error."""

    number: int
    error: UserError


def tokenize(
    recipe: Recipe,
    folder: Path,
    pieces: Mapping[int, Sequence[Span]],
    on_done: Callable[[Sequence[Span]], None],
    limit: int | None = None,
) -> None:
    """Make a shard of each piece and call `on_done` for it; raise the UserError of the first bad piece.

    Uses at most `limit` processes; None means one per core.
    """
    if len(pieces) <= ALONE:
        worker = Worker(recipe, folder)
        for number, spans in pieces.items():
            worker.tokenize(number, spans)
            on_done(spans)
        return
    with processes(min(len(pieces), limit or len(os.sched_getaffinity(0))), recipe, folder) as idle:
        share(pieces, idle, on_done)


def share(
    pieces: Mapping[int, Sequence[Span]], idle: list[subprocess.Popen[str]], on_done: Callable[[Sequence[Span]], None]
) -> None:
    """Give each idle process a piece until all are done."""
    waiting = iter(pieces)
    busy: dict[Any, tuple[subprocess.Popen[str], int]] = {}  # by the process's output
    failure: Failure | None = None
    while True:
        while idle and failure is None and (number := next(waiting, None)) is not None:
            process = idle.pop()
            ask(process, [number, pieces[number]])
            busy[process.stdout] = process, number
        if not any(failure is None or number < failure.number for _, number in busy.values()):
            break
        for output in select.select(list(busy), [], [])[0]:
            process, number = busy.pop(output)
            idle.append(process)
            if (error := answer(process)[1]) is None:
                on_done(pieces[number])
            elif failure is None or number < failure.number:
                failure = Failure(number, error)
    if failure:
        raise failure.error


@contextmanager
def processes(count: int, recipe: Recipe, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield processes that tokenize by a recipe; they are killed at the end of the block, or with this process."""
    started = []
    with stored(recipe) as file:
        try:
            for _ in range(count):
                started.append(start("compiler_trainer.data.worker", file, str(folder)))
            yield list(started)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


@contextmanager
def stored(recipe: Recipe) -> Iterator[str]:
    """Yield the path of a file with a recipe, whose vocabulary takes megabytes."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(recipe.to_json(), file, default=str)
        file.flush()
        yield file.name


def start(module: str, *arguments: object, threads: bool = False) -> subprocess.Popen[str]:
    """Return a process that runs a module, with its first line; it ends with this process.

    Without `threads`, tokenizers use only one: those of several processes would compete, and they ignore interruptions.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    env["TOKENIZERS_PARALLELISM"] = str(threads).lower()
    command = [sys.executable, "-m", module]
    # In its own process group, it does not get Ctrl-C.
    process = subprocess.Popen(command, env=env, process_group=0, stdin=PIPE, stdout=PIPE, text=True)
    ask(process, list(arguments))
    return process


def ask(process: subprocess.Popen[str], content: object) -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    print(json.dumps(content, default=str), file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> tuple[Any, UserError | None]:
    """Return the result of a process's last call, and its error, or None."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        raise RuntimeError(f"a tokenizing process ended with exit code {code}; -9 often means out of memory")
    result, error = json.loads(line)
    return result, error and UserError(*error)


# ---- progress ------------------------------------------------------------------------------------------


LINE_EVERY_S = 10.0


class Bar(Renewed):
    """A context manager that shows the bytes done of `size_bytes`: a bar on a terminal, or lines at intervals."""

    def __init__(self, size_bytes: int, bytes_done: int = 0):
        super().__init__(BarColumn(), TextColumn("{task.description}"), transient=True)
        self.size_bytes, self.bytes_done, self.first = size_bytes, bytes_done, bytes_done
        self.task = self.bar.add_task(f"tokenizing {decimal(size_bytes)}", total=size_bytes, completed=bytes_done)

    def add(self, size_bytes: int) -> None:
        """Add `size_bytes` to the bytes done."""
        self.bytes_done += size_bytes
        self.bar.update(self.task, completed=self.bytes_done, description=self.line())
        now = time.monotonic()
        if not self.console.is_terminal and now - self.last_line >= LINE_EVERY_S:
            self.last_line = now
            say(self.line())

    def line(self) -> str:
        """Return `tokenizing: 512.0 MB of 1.0 GB, 11.2 MB/s, 45 s left`."""
        rate = (self.bytes_done - self.first) / max(time.monotonic() - self.started, 1e-9)
        seconds_left = (self.size_bytes - self.bytes_done) / max(rate, 1)
        progress = f"{decimal(self.bytes_done)} of {decimal(self.size_bytes)}"
        return f"tokenizing: {progress}, {decimal(int(rate))}/s, {seconds_left:.0f} s left"
