"""Console output: lines, and on a terminal a line that updates itself."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn

WIDTH, WIDEST = 160, 220  # columns if the output is no terminal


def say(text: str, to: TextIO | None = None) -> None:
    """Print a line at once in a single write, so that lines of threads do not mix.

    If nobody reads the output any more, or its disk is full, later lines are dropped: a run does not end for it.
    """
    try:
        print(f"{text}\n", end="", file=to, flush=True)
    except OSError:
        if to is None:
            sys.stdout = open(os.devnull, "w")


def wide(width: int = WIDTH, **options: Any) -> Console:
    """Return a console for tables; if the output is no terminal, it is `width` columns wide."""
    console = Console(file=sys.stdout, **options)
    return console if console.is_terminal else Console(file=sys.stdout, width=width, **options)


def tabular() -> Console:
    """Return a console for tables of graph nodes, which prints text without markup."""
    return wide(WIDEST, highlight=False, markup=False)


class Renewed:
    """A self-updating line of `columns` on a terminal, as a context manager."""

    def __init__(self, *columns: ProgressColumn, to: TextIO | None = None, **options: Any):
        self.console = Console(file=to or sys.stdout)
        self.bar = Progress(*columns, console=self.console, **options)
        self.started = self.last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.console.is_terminal:
            self.bar.stop()
