"""Options that stand for others, by the names that users know.

    train.precision=bf16        # sets what conf/train/precision/bf16.yaml sets
    model=Qwen/Qwen3-0.6B       # model=hf model.path=Qwen/Qwen3-0.6B

Command lines, job files and Python take them. They are replaced before hydra composes a job, so a run's config.yaml has
the options that they stand for. Together with one of these, they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF, load_yaml
from compiler_trainer.config.options import flat, one_of, spelled

CHOICES = {  # option -> its description; its choices are the files in conf/
    "train.precision": "dtype of compute: bfloat16 over float32 master weights, float32, or float8 for linear layers",
    "train.activation_checkpointing": "activations kept for the backward; auto: as many as fit in a GPU's memory",
}
LOGGERS = {  # entries of run.loggers
    "wandb": {"_target_": "compiler_trainer.WandB"},
    "mlflow": {"_target_": "compiler_trainer.MLflow"},
}
BATCH_PER_RANK = "train.batch_per_rank"
LEADING = re.compile(r"[+~]*")


def replaced(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the options that short names stand for; raise UserError if both are there, unless null."""
    refuse_both(name_of(override) for override in overrides if not override.endswith("=null"))
    return [plain for override in overrides for plain in replacement(override)]


def stated(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the names of the options that arguments set, among them those that short names stand for."""
    for name in map(name_of, arguments):
        yield name
        yield from targets(name)


def replacement(override: str) -> list[str]:
    """Return the overrides that one stands for: itself, if it has no short name."""
    name, is_option, quoted = override.partition("=")
    value = quoted.strip("'\"")
    if name in CHOICES and is_option and value != "null":
        chosen = [one_of(tuple(choices(name)), choice, name) for choice in value.split(",")]
        if len(chosen) > 1:  # a sweep: hydra chooses
            return [f"+{folder(name)}={value}"]
        return [f"{target}={spelled(setting)}" for target, setting in settings(name, value).items()]
    if name in CHOICES and is_option:
        return []
    if name == "model" and is_path(value):
        return ["model=hf", f"model.path={quoted}"]
    return [override]


def is_path(value: str) -> bool:
    """Return True if a value of `model`, or each of several, is a folder or a model of the hub, and no choice."""
    names = value.split(",")
    return all("/" in x or Path(x).is_dir() and not (CONF / "model" / f"{x}.yaml").exists() for x in names)


def refuse_both(names: Iterable[str]) -> None:
    """Raise UserError if a short name and an option that it stands for are among `names`."""
    stated = set(names)
    for name in (*CHOICES, BATCH_PER_RANK):
        both = sorted(stated & targets(name))
        if name in stated and both:
            raise UserError(name, f"stands for {', '.join(sorted(targets(name)))}; leave out {name} or {both[0]}")


@cache
def targets(name: str) -> frozenset[str]:
    """Return the options that a short name stands for, by dotted names; none for other names."""
    if name == BATCH_PER_RANK:
        return frozenset({"train.microbatches"})
    return frozenset(target for choice in choices(name) for target in settings(name, choice))


def choices(name: str) -> list[str]:
    """Return the choices of a short name; none for other names."""
    return sorted(path.stem for path in (CONF / folder(name)).glob("*.yaml")) if name in CHOICES else []


def settings(name: str, choice: str) -> dict[str, Any]:
    """Return the options that a choice sets, by dotted names."""
    return flat(load_yaml(CONF / folder(name) / f"{choice}.yaml"))


def folder(name: str) -> str:
    """Return the folder in conf/ with the choices of a short name, which is a group of hydra's."""
    return name.replace(".", "/")


def name_of(override: str) -> str:
    """Return the name of the option that an override sets."""
    return LEADING.sub("", override.partition("=")[0], count=1)


def taken_out(groups: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return (overrides of short names, the other options) of groups of options.

    Raises UserError if a group has both a short name and an option that it stands for.
    """
    refuse_both(name for name, value in flat(groups).items() if value is not None)
    others, overrides = {**groups}, []
    for name in CHOICES:
        group, _, key = name.partition(".")
        if isinstance(options := others.get(group), Mapping) and key in options:
            others[group] = {other: value for other, value in options.items() if other != key}
            overrides.append(f"{name}={'null' if options[key] is None else options[key]}")
    return overrides, others


def with_loggers(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a job with classes for the names in `run.loggers`; raise UserError for an unknown name."""
    loggers = options.get("run", {}).get("loggers")
    if not isinstance(loggers, list | tuple):
        return options
    classes = [LOGGERS[one_of(tuple(LOGGERS), x, "run.loggers")] if isinstance(x, str) else x for x in loggers]
    return {**options, "run": {**options["run"], "loggers": classes}}
