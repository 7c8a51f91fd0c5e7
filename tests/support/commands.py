"""The command `compiler-trainer` in this process."""

from __future__ import annotations

from unittest.mock import patch

from compiler_trainer.cli import command


def call(*arguments: object) -> int:
    """Run the command with some arguments; return the exit code."""
    with patch("sys.argv", ["compiler-trainer", *map(str, arguments)]):
        try:
            command.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
