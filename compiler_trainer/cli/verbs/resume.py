"""`resume`: train up to train.steps from the newest checkpoint, or from the beginning if there is none."""

from __future__ import annotations

from collections.abc import Sequence

from compiler_trainer.cli.outcome import outcome
from compiler_trainer.cli.table import run_parser
from compiler_trainer.runs.saved import at_checkpoint, going_on, options_of


def main(arguments: Sequence[str]) -> None:
    """Resume training."""
    args = run_parser("resume", overrides=True).parse_intermixed_args(arguments)
    outcome(going_on(at_checkpoint(options_of(args.run, args.overrides), args.checkpoint), "auto"))
