"""`check`: read every byte of the checkpoints in a folder; exit with 2 if one is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.checkpoint import aside, check_all, complete
from compiler_trainer.cli.table import parser
from compiler_trainer.runs.saved import best


def chosen(folder: Path, which: str | None) -> Path:
    """Return the folder to check, or its checkpoint `which`."""
    if which is None:
        return folder
    inside = folder if complete(folder) else folder / "checkpoints"
    if which == "latest":
        return (complete(inside) or [folder])[-1]
    return best(inside) if which == "best" else Path(which)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each checkpoint; return the exit code."""
    arg_parser = parser("check")
    arg_parser.add_argument("folder", type=Path, help="a run folder, a folder of checkpoints, or a checkpoint")
    arg_parser.add_argument(
        "--checkpoint", metavar="best|latest|PATH", help="check one checkpoint of a run folder, not all"
    )
    args = arg_parser.parse_args(arguments)
    if args.checkpoint is None:
        for path in aside(args.folder):
            print(f"{path}: set aside as {path.suffix[1:]}, no command reads it", flush=True)
    damaged = False
    for path, message, is_whole in check_all(chosen(args.folder, args.checkpoint)):
        print(f"{path}: {'whole' if is_whole else 'damaged'}, {message}", flush=True)
        damaged = damaged or not is_whole
    return 2 if damaged else 0
