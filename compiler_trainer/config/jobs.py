"""Job files: YAML files of options, which the command line takes wherever it takes OPTION=VALUE.

    recipe: lora                       # a choice of a group, by name
    model: {path: Qwen/Qwen3-0.6B}     # options of a group
    data: {name: text, files: [chats.jsonl], chat: true}     # both: `name` is the choice
    train.steps: 3epochs               # dotted names

A file becomes overrides. Other arguments win over it: an option over that option, a choice (`optim=muon`) over all of
the group. A run's config.yaml is a job file, too: it starts the same job in a new folder.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString

from compiler_trainer.config import short_names
from compiler_trainer.config.earlier import renamed
from compiler_trainer.config.errors import STATED, UserError
from compiler_trainer.config.files import CONF, load_yaml, text_of
from compiler_trainer.config.options import flat, tables
from compiler_trainer.config.schema import WRITTEN, Config, DataConfig

ENDINGS = (".yaml", ".yml")
NAME = re.compile(r"[\w./@-]+", re.ASCII)
OF_INNER_GROUP = re.compile(r"model\.\w+\.[^=]+=")
OF_ONE_RUN = ("run.dir", "checkpoint.dir", "checkpoint.store", "checkpoint.resume", "checkpoint.allow")


# ---- files ---------------------------------------------------------------------------------------------


def is_job_file(argument: str) -> bool:
    """Return True if an argument names a job file."""
    return not argument.startswith("-") and "=" not in argument and argument.endswith(ENDINGS)


def with_files(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the job file replaced by its overrides; these come first, so that all others win.

    Raises UserError if there is no such file, if it holds no options, or if there are two.
    """
    files = [argument for argument in arguments if is_job_file(argument)]
    stated = list(short_names.stated(arguments))
    others = map(quoted, short_names.replaced([argument for argument in arguments if not is_job_file(argument)]))
    if len(files) > 1:
        raise UserError(files[1], f"is a job file, and so is {files[0]}; write all options into one of them")
    return [override for file in files for override in overrides_of(Path(file), stated)] + made_where_missing(others)


def overrides_of(path: Path, stated: Sequence[str]) -> list[str]:
    """Return the overrides for the options in a file, without those in `stated`; record their lines for errors."""
    options, lines = load_yaml(path), lines_of(path)
    STATED.update(dict.fromkeys(stated, ""))
    is_of_run = options.keys() >= {*WRITTEN}
    if is_of_run:
        options = renamed(options)
    overrides = []
    for name, value in entries(options).items():
        if any(f"{name}.".startswith(f"{other}.") for other in stated) or is_of_run and name in OF_ONE_RUN:
            continue
        if not NAME.fullmatch(name):
            raise UserError(f"{path}:{lines.get(name, 1)}", f"{name!r} is not the name of an option")
        STATED[name] = f"{path}:{lines.get(name, lines.get('defaults', 1))}"
        if is_of_run and name in TABLES:  # all of the table is in the file
            overrides += [f"~{name}", f"+{name}={as_override(value, name)}"]
        else:
            overrides.append(f"{name}={as_override(value, name)}")
    return made_where_missing(short_names.replaced(overrides))


def made_where_missing(overrides: Iterable[str]) -> list[str]:
    """Return overrides that also set an option of a group of `model` that is null, as `model.mtp` is at first."""
    return [f"++{override}" if OF_INNER_GROUP.match(override) else override for override in overrides]


def entries(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of groups in a job, then its other options, by their names on a command line."""
    choices = choices_of_defaults(options.get("defaults") or ())
    groups = {str(group): value for group, value in options.items() if group != "defaults" and value not in ({}, None)}
    choices |= {group: choice for group, value in groups.items() if (choice := choice_of(group, value))}
    return choices | {name: value for name, value in flat(groups, TABLES).items() if name not in choices}


def choices_of_defaults(lines: Sequence[Any]) -> dict[str, str]:
    """Return the choices in a defaults list of hydra, as `lora` or `override /optim: muon`; a bare name is a recipe."""
    choices: dict[str, str] = {}
    for line in lines:
        pairs = line if isinstance(line, Mapping) else {"recipe": line}
        choices |= {str(key).removeprefix("override ").strip("/ "): str(value) for key, value in pairs.items()}
    return {group: choice for group, choice in choices.items() if choice != "_self_"}


def choice_of(group: str, options: Any) -> str | None:
    """Return the name of the choice that a group's options belong to; None for the default, or if it is no group."""
    if isinstance(options, str):
        return options if (CONF / group).is_dir() else None
    if not isinstance(options, Mapping):
        return None
    if options.get("_target_"):
        return None if group == "loss" else "custom"
    if group == "model" and "path" in options:
        return "hf"
    name = options.get("name")
    return name if name and (CONF / group / f"{name}.yaml").exists() else None


def lines_of(path: Path) -> dict[str, int]:
    """Return the lines of the keys in a YAML file, by dotted names."""
    lines: dict[str, int] = {}

    def note(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = f"{prefix}{key.value}"
            lines[name] = key.start_mark.line + 1
            note(value, f"{name}.")

    note(yaml.compose(text_of(path), yaml.SafeLoader), "")
    return lines


# ---- options as overrides ------------------------------------------------------------------------------


TABLES = {*tables(Config())} - {"loss"}  # a choice of `loss` is a group, too


PLAIN = re.compile(r"([A-Za-z_]|\.{0,2}/)[\w/.-]*", re.ASCII)  # texts that hydra reads without quotes
WORDS = ("null", "true", "false", "nan", "inf", "on", "off", "yes", "no", "none")
SPECIAL = re.compile(r"([\\()\[\]{}:=, \t])")  # characters of hydra's grammar
KEY = re.compile(r"[\w/+.$%*@?|()\[\]{}:=, \t\\-]+", re.ASCII)  # texts that hydra reads as keys, if they are no values
VALUE = re.compile(r"null|true|false|[+-]?(nan|inf|[\d._]+(e[+-]?\d+)?)", re.ASCII | re.IGNORECASE)
OF_RECORDS = ("chat", "pairs", "train_on", "records", "labels", "margins")  # of `data`
NO_KEY = "cannot be the name of an entry; use letters from a to z, then digits and any of . _ - / *, without quotes"
QUOTED_KEY = re.compile(r"""[{,]\s*("[^"]*"|'[^']*')\s*:""")
UNQUOTED = r"""(?:\$\{[^}]*\}|\\.|://|[^\s,=:\[\]{}()"'\\])+"""
TEXTS = re.compile(rf"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|({UNQUOTED}(?:[ \t]+{UNQUOTED})*)""")  # quoted, or not


def as_override(value: Any, option: str = "") -> str:
    """Return a value as hydra reads it in an override: null, true, [1,2], {layers.\\[01\\]:full}, 'a b'.

    Raises UserError naming the option if a key of a mapping cannot be written.
    """
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{as_key(key, option)}:{as_override(x, option)}' for key, x in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(as_override(entry, option) for entry in value)}]"
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = PLAIN.fullmatch(value) and value.lower() not in WORDS
    return value if is_plain else QuotedString(value, Quote.single).with_quotes()


def as_key(key: Any, option: str) -> str:
    """Return a key of a mapping as hydra reads it, which takes no quotes there; raise UserError for other texts."""
    if isinstance(key, str) and (VALUE.fullmatch(key) or not KEY.fullmatch(key)):
        raise UserError(option, f"{key!r} {NO_KEY}")
    return SPECIAL.sub(r"\\\1", str(key))


def pasted(options: Mapping[str, Any]) -> str:
    """Return options, by dotted names, as overrides to paste into a command line."""
    return " ".join(shlex.quote(f"{name}={as_override(value)}") for name, value in options.items())


def of_records(cfg: DataConfig) -> dict[str, Any]:
    """Return the options that decide which tokens a record becomes, by dotted names, without those left as they are."""
    return {f"data.{x}": getattr(cfg, x) for x in OF_RECORDS if getattr(cfg, x) != getattr(DataConfig, x)}


def quoted(override: str) -> str:
    """Return an override with quotes around the texts in its value that hydra takes in quotes only, as ü."""

    def in_quotes(match: re.Match[str]) -> str:
        """Return a text in quotes if it needs them."""
        if match[1] or match[2].isascii():
            return match[0]
        return QuotedString(re.sub(rf"\\{SPECIAL.pattern}", r"\1", match[2]), Quote.double).with_quotes()

    name, is_option, value = override.partition("=")
    return f"{name}{is_option}{TEXTS.sub(in_quotes, value)}"
