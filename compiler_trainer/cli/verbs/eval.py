"""`eval`: loss and perplexity on the validation batches of training, or on the text of data=..."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.ends import is_first
from compiler_trainer.cli.table import run_parser
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, MeshConfig
from compiler_trainer.runs.evaluate import evaluate
from compiler_trainer.runs.saved import at_checkpoint, options_of

OTHER_TEXT = (
    "data.files", "data.tokens", "data.sources", "data.path", "data.configuration", "data.split", "data._target_",
    "data.arguments", "data.documents",
)  # fmt: skip
HOW_MUCH = (
    "Validation data is evaluated as in training, in eval.batches batches; other text (data=text data.files=[FILE]) "
    "in full. eval.batches=N evaluates N batches, eval.batches=null all text."
)


def main(arguments: Sequence[str]) -> None:
    """Print loss and perplexity on a line."""
    arg_parser = run_parser("eval", overrides=True)
    arg_parser.epilog = HOW_MUCH
    args = arg_parser.parse_intermixed_args(arguments)
    message = evaluate(*evaluated_config(args.run, args.overrides, args.checkpoint))
    if is_first():
        print(message)


def evaluated_config(run: Path, overrides: Sequence[str], checkpoint: str | None) -> tuple[Config, bool]:
    """Return the options of a run to evaluate, and True if they name other text than the run's validation data.

    The ranks are data-parallel unless the options set a mesh.
    """
    cfg = at_checkpoint(options_of(run, overrides), checkpoint)
    names = [override.lstrip("+").partition("=")[0] for override in overrides]
    if not any(name.startswith("mesh.") for name in names):
        cfg = dataclasses.replace(cfg, mesh=MeshConfig())
    other = any(name == "data" or name.startswith(OTHER_TEXT) for name in names)
    if other and "eval.batches" not in names:
        cfg = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, batches=None))
    if not other and not cfg.data.eval_fraction and not cfg.data.validation:
        raise UserError(
            "data.eval_fraction", "is 0, so there is no validation data; name a text, as in data.files=[FILE]"
        )
    return cfg, other
