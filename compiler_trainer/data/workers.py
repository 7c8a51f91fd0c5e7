"""Tokenize the pieces of a corpus in several processes, which end together with this one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from compiler_trainer.config.errors import UserError
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
            if (error := answer(process)) is None:
                on_done(pieces[number])
            elif failure is None or number < failure.number:
                failure = Failure(number, error)
    if failure:
        raise failure.error


@contextmanager
def processes(count: int, recipe: Recipe, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield processes that tokenize by a recipe; they are killed at the end of the block, or with this process."""
    # Tokenizer threads of all processes would compete, and they ignore interruptions.
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "compiler_trainer.data.worker"]
    started = []
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:  # the vocabulary takes megabytes
        json.dump(recipe.to_json(), file, default=str)
        file.flush()
        try:
            for _ in range(count):
                # In their own process group, they do not get Ctrl-C.
                started.append(subprocess.Popen(command, env=env, process_group=0, stdin=PIPE, stdout=PIPE, text=True))
                ask(started[-1], [file.name, str(folder)])
            yield list(started)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


def ask(process: subprocess.Popen[str], content: object) -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    print(json.dumps(content, default=str), file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> UserError | None:
    """Return the error of the piece that a process was given, or None."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        raise RuntimeError(f"a tokenizing process ended with exit code {code}; -9 often means out of memory")
    values = json.loads(line)
    return values and UserError(*values)
