"""`eval`: loss and perplexity on what the run held out, or on all of the text that data=... names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from compiler_trainer.cli.ends import RANK
from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.runs.evaluate import evaluate
from compiler_trainer.runs.saved import at_checkpoint, options_of

OTHER_TEXT = ("data.files", "data.sources", "data.path", "data.split")


def main(arguments: Sequence[str]) -> None:
    """Print them on a line."""
    given = run_parser("eval", overrides=True).parse_intermixed_args(arguments)
    cfg = at_checkpoint(options_of(given.run, given.overrides), given.checkpoint)
    names = [override.lstrip("+").partition("=")[0] for override in given.overrides]
    if not any(name.startswith("mesh.") for name in names):
        cfg = dataclasses.replace(cfg, mesh=MeshConfig())
    anew = any(name == "data" or name.startswith(OTHER_TEXT) for name in names)
    result = evaluate(cfg, anew, cfg.eval.batches if "eval.batches" in names else None)
    if RANK == 0:
        print(", ".join(f"{name} {value:{',' if name == 'tokens' else '.6g'}}" for name, value in result.items()))
