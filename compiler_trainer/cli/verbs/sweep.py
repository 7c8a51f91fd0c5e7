"""`sweep`: write the table, plots and files of a sweep again, from its points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.table import parser
from compiler_trainer.sweep.render import render


def main(arguments: Sequence[str]) -> None:
    """Render the sweep in a folder."""
    arg_parser = parser("sweep")
    arg_parser.add_argument("folder", type=Path, metavar="DIR", help="the run.dir of a multirun")
    render(arg_parser.parse_args(arguments).folder)
