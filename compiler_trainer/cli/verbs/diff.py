"""`diff`: show the differences between two runs; exit with 0 if there are none, otherwise with 1."""

from __future__ import annotations

from collections.abc import Sequence

from compiler_trainer.cli.table import parser
from compiler_trainer.console import tabular
from compiler_trainer.inspect.diff import show
from compiler_trainer.inspect.dumps import load


def main(arguments: Sequence[str]) -> int:
    """Print the differences; return the exit code."""
    arg_parser = parser("diff")
    arg_parser.add_argument("a", metavar="RUN", help="a run folder")
    arg_parser.add_argument("b", metavar="OTHER", help="another")
    args = arg_parser.parse_args(arguments)
    return int(show(load(args.a), load(args.b), tabular()))
