"""`check-export`: compare transformers' results for an export with the trainer's for the checkpoint.

    compiler-trainer check-export RUN OUT
    compiler-trainer check-export RUN OUT --ema
    compiler-trainer check-export RUN OUT data=text data.files=[FILE]

Exit codes: 0 they are the same, 1 they differ, 2 the folder is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.ends import RANK
from compiler_trainer.cli.table import run_parser
from compiler_trainer.cli.verbs.eval import asked
from compiler_trainer.config.errors import UserError
from compiler_trainer.runs.check_export import check_export


def main(arguments: Sequence[str]) -> int:
    """Print the difference; return the exit code."""
    takes = run_parser("check-export")
    takes.add_argument("out", type=Path, metavar="OUT", help="a folder that `export` wrote of the same checkpoint")
    takes.add_argument("--tokens", type=int, default=64, help="how many tokens to compare, about (default 64)")
    takes.add_argument("--ema", action="store_true", help="compare with the averages of weights (train.ema)")
    takes.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options that change")
    given = takes.parse_intermixed_args(arguments)
    if given.tokens < 1:
        raise UserError("--tokens", f"is {given.tokens}; compare at least 1")
    if not given.out.is_dir():
        raise UserError(str(given.out), "is no folder; write one with compiler-trainer export RUN OUT")
    cfg, other = asked(given.run, given.overrides, given.checkpoint)
    is_same, said = check_export(cfg, other, given.out, given.tokens, given.ema)
    if RANK == 0:
        print(f"{given.out}: {said}")
    return 0 if is_same else 1
