"""The command `compiler-trainer` in this process."""

from __future__ import annotations

from unittest.mock import patch

from compiler_trainer.cli import command


def call(*arguments: object) -> int:
    """Do what the arguments say; the exit code."""
    with patch("sys.argv", ["compiler-trainer", *map(str, arguments)]):
        try:
            command.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
