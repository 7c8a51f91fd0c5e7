"""What is said on the console: lines, and on a terminal one that renews itself."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn

WIDTH, WIDEST = 160, 220  # of what is no terminal


def say(text: str, to: TextIO | None = None) -> None:
    """Print a line at once, on standard output or elsewhere, in one write: threads' lines do not mix."""
    print(f"{text}\n", end="", file=to, flush=True)


def wide(width: int = WIDTH, **how: Any) -> Console:
    """A console for tables: where it is no terminal, as wide as their columns need."""
    found = Console(file=sys.stdout, **how)
    return found if found.is_terminal else Console(file=sys.stdout, width=width, **how)


def tabular() -> Console:
    """A console for tables of graph nodes, whose text is shown as it is."""
    return wide(WIDEST, highlight=False, markup=False)


class Renewed:
    """A line of `columns` that is there while this is used as a context manager, if the console is a terminal."""

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
