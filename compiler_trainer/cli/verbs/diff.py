"""`diff`: show the differences between two runs; exit with 0 if there are none, otherwise with 1."""

from __future__ import annotations

from collections.abc import Sequence

from compiler_trainer.cli.table import parser
from compiler_trainer.console import tabular
from compiler_trainer.inspect.diff import show
from compiler_trainer.inspect.dumps import load


def main(arguments: Sequence[str]) -> int:
    """Print the differences; return the exit code."""
    takes = parser("diff")
    takes.add_argument("a", metavar="RUN", help="a run folder")
    takes.add_argument("b", metavar="OTHER", help="another")
    given = takes.parse_args(arguments)
    return int(show(load(given.a), load(given.b), tabular()))
