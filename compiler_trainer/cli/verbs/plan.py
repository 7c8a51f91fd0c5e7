"""`plan`: find the fastest mesh, microbatches and recomputation for a model on a cluster, and write a job file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import as_user_errors, compose, search_path, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.jobs import quoted, with_files

if TYPE_CHECKING:  # torch is slow to import, and a refusal of options does not need it
    from compiler_trainer.planning.plan import Question


def main(arguments: Sequence[str]) -> None:
    """Plan for the job of the options, or for each value of `--vary`."""
    arg_parser = parser("plan")
    arg_parser.add_argument(
        "overrides", nargs="*", metavar="OPTION=VALUE", help="the job; options that you set are kept"
    )
    arg_parser.add_argument("--vary", action="append", default=[], metavar="OPTION=V1,V2", help="plan for each value")
    arg_parser.add_argument("--config-dir", type=Path, help="a folder of your own choices")
    args = arg_parser.parse_intermixed_args(arguments)
    stated = with_files(args.overrides)
    overrides = [*stated, *search_path(args.config_dir)]
    questions = [question(overrides, stated, values) for values in varied_values(args.vary)]
    from compiler_trainer.planning.plan import plan, plan_all

    if args.vary:
        plan_all(questions)
    else:
        plan(questions[0])


def question(overrides: Sequence[str], stated: Sequence[str], values: dict[str, Any]) -> Question:
    """Return the question to plan for: the default job with overrides, and with `values`."""
    changed = [f"{name}={value}" for name, value in values.items()]
    groups = frozenset(path.name for path in CONF.iterdir() if path.is_dir())
    cfg = to_config(compose([*overrides, *changed]))
    from compiler_trainer.config.device import for_predicting
    from compiler_trainer.planning.plan import Question

    return Question(for_predicting(cfg), [*stated, *changed], groups, values)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def varied_values(variations: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of the values of `--vary`, numbers or texts of overrides.

    Raises UserError if one is not a list of values.
    """
    lists: list[list[tuple[str, Any]]] = []
    reader = OverridesParser.create()
    with as_user_errors():
        for variation in reader.parse_overrides([quoted(variation) for variation in variations]):
            if not variation.is_discrete_sweep():
                raise UserError(
                    "--vary", f"{variation.input_line} is one value; give several, as train.seq_len=8192,32768"
                )
            name = variation.get_key_element().lstrip("+")
            texts = [str(text) for text in variation.sweep_string_iterator()]
            values = [value.value() for value in reader.parse_overrides([f"{name}={text}" for text in texts])]
            lists.append([(name, v if is_number(v) else text) for v, text in zip(values, texts, strict=True)])
    return [dict(values) for values in itertools.product(*lists)]
