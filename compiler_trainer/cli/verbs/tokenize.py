"""`tokenize`: tokenize a job's data ahead of time, on any machine, with several processes and nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.jobs import of_records, pasted
from compiler_trainer.config.validate import validate_data
from compiler_trainer.data.stored import Share
from compiler_trainer.data.tokenized import FILE, write


def main(arguments: Sequence[str]) -> None:
    """Tokenize the data of the options, and print how to train with it."""
    arg_parser = parser("tokenize")
    arg_parser.add_argument(
        "overrides", nargs="*", metavar="OPTION=VALUE", help="the data and its tokenizer, as in training"
    )
    arg_parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the tokens; a later start continues there"
    )
    arg_parser.add_argument("--shard", default="0/1", metavar="I/N", help="the share of node I, from 0, of N nodes")
    arg_parser.add_argument(
        "--processes", type=int, metavar="COUNT", help="processes on this machine (default: one per core)"
    )
    args = arg_parser.parse_intermixed_args(arguments)
    cfg = validate_data(to_config(compose(args.overrides)))
    tokens = write(cfg, args.out, share_of(args.shard, args.processes))
    if tokens is None:
        print(
            f"share {args.shard} is done; the share that finishes last joins all shares, and writes {args.out / FILE}"
        )
        return
    holds = tokens.holds
    skipped = f", {holds.skipped:,} bad records skipped, the first is {holds.first_skipped}" if holds.skipped else ""
    print(f"{holds.tokens:,} tokens of {holds.documents:,} documents in {args.out}, digest {holds.digest}{skipped}")
    options = {"data": "tokens", "data.tokens": str(args.out), "data.tokenizer": cfg.tokenizer, **of_records(cfg)}
    print(f"train with: compiler-trainer {pasted(options)}")


def share_of(shard: str, processes: int | None) -> Share:
    """Return the share of `--shard` and `--processes`; raise UserError."""
    if not re.fullmatch(r"\d{1,6}/\d{1,6}", shard) or not (share := Share(*map(int, shard.split("/")))).is_one:
        raise UserError("--shard", f"{shard} is not a share; give I/N, I from 0 to N - 1, as 0/4")
    if processes is not None and processes < 1:
        raise UserError("--processes", f"{processes} must be at least 1")
    return share._replace(processes=processes)
