"""`check-export`: compare transformers' results for an export with the trainer's for the checkpoint.

    compiler-trainer check-export RUN OUT
    compiler-trainer check-export RUN OUT.gguf
    compiler-trainer check-export RUN OUT --ema
    compiler-trainer check-export RUN OUT data=text data.files=[FILE]

Exit codes: 0 they are the same, 1 they differ, 2 the folder is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.ends import is_first
from compiler_trainer.cli.table import run_parser
from compiler_trainer.cli.verbs.eval import evaluated_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.models.gguf.file import is_gguf
from compiler_trainer.runs.check_export import check_export


def main(arguments: Sequence[str]) -> int:
    """Print the difference; return the exit code."""
    arg_parser = run_parser("check-export")
    arg_parser.add_argument(
        "out", type=Path, metavar="OUT", help="a folder or file that `export` wrote from the same checkpoint"
    )
    arg_parser.add_argument(
        "--tokens", type=int, default=64, help="approximate number of tokens to compare (default 64)"
    )
    arg_parser.add_argument("--ema", action="store_true", help="compare with the averages of weights (train.ema)")
    arg_parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options that change")
    args = arg_parser.parse_intermixed_args(arguments)
    if args.tokens < 1:
        raise UserError("--tokens", f"is {args.tokens}; compare at least 1")
    if not (args.out.is_file() if is_gguf(args.out) else args.out.is_dir()):
        raise UserError(str(args.out), "is no folder or GGUF file; write one with compiler-trainer export RUN OUT")
    cfg, other = evaluated_config(args.run, args.overrides, args.checkpoint)
    is_same, message = check_export(cfg, other, args.out, args.tokens, args.ema)
    if is_first():
        print(f"{args.out}: {message}")
    return 0 if is_same else 1
