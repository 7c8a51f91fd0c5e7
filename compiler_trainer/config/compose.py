"""The default job with overrides, composed by hydra, and the errors of hydra and omegaconf in one line.

`CONF` is conf/ next to the package in a clone, inside it if installed. A recipe may be a user's file, as in
`recipe=job.yaml` or `recipe=RUN/config.yaml`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from compiler_trainer.config import foreign
from compiler_trainer.config.cluster import AUTO_CLUSTER
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import load_yaml
from compiler_trainer.config.options import build, not_one_of, tables, unknown
from compiler_trainer.config.schema import AUTO, WRITTEN, Config, ModelConfig

PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(path for path in (PACKAGE / "conf", PACKAGE.parent / "conf") if (path / "train.yaml").is_file())


# ---- defaults ------------------------------------------------------------------------------------------


def store_defaults() -> None:
    """Store every option with its default for hydra. The options of a decoder are stored as `model=decoder`."""
    options, decoder = defaults(), OmegaConf.create(dataclasses.asdict(ModelConfig()))
    OmegaConf.set_struct(decoder, True)
    options.model = {}
    options.cluster = {}  # the figures come from a choice of `cluster`
    for group in (options.model, options.cluster):  # a folder or the user's module has other options
        OmegaConf.set_struct(group, False)
    ConfigStore.instance().store(name="options", node=options)
    ConfigStore.instance().store(group="model", name="decoder", node=decoder)


def defaults() -> DictConfig:
    """Return every option with its default. Tables accept any names."""
    options = OmegaConf.create(dataclasses.asdict(Config()))
    for name in tables(Config()):
        OmegaConf.set_struct(OmegaConf.select(options, name), False)
    return options


# ---- errors --------------------------------------------------------------------------------------------


GOES_WITH = {  # options that exist only with another choice of `model`
    "model._target_": "goes with model=custom, next to the arguments of `_target_`",
    "model.path": "goes with model=hf: a folder that transformers saved, or ORGANIZATION/NAME of a model of the hub",
    "model.lora": "goes with model=hf, or recipe=lora",
}
INPUT_ERRORS = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # hydra raises the last
LECTURES = ("See https://hydra.cc", "\n\n")  # begin hydra's explanation of its grammar


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise UserError for hydra's errors inside the context."""
    try:
        yield
    except INPUT_ERRORS as error:
        raise user_error(error) from error


def user_error(error: Exception) -> UserError:
    """Return an error of composing as a UserError of one line."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OverrideParseException):
        return UserError(error.override, unreadable(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return UserError(group, "; ".join(filter(None, [not_one_of(error.options, choice), foreign.answer(choice)])))
    cause = error.__cause__ or error
    if not isinstance(cause, OmegaConfBaseException):
        return several_values(error) or UserError("config", one_line(str(error)))
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        group, _, key = cause.full_key.rpartition(".")
        return UserError(cause.full_key, GOES_WITH.get(cause.full_key) or unknown(key, names_in(group)))
    if isinstance(cause, MissingMandatoryValue) and cause.full_key:
        name = cause.full_key
        return UserError(name, f"must be given, as {name}=VALUE; compiler-trainer --help {name} describes it")
    return UserError(cause.full_key or "config", str(cause).partition("\n")[0])


def unreadable(error: OverrideParseException) -> str:
    """Return the reason why an override cannot be read."""
    if "=" not in error.override:
        return (
            "is not of the form OPTION=VALUE; a verb comes first, options alone train a model: compiler-trainer --help"
        )
    message = str(error)
    for end in LECTURES:
        message = message.partition(end)[0]
    return one_line(message)


def several_values(error: Exception) -> UserError | None:
    """Return the error for an option with a comma in its value, None for any other error.

    Hydra's own message gives three ways to write it.
    """
    message = str(error)
    if not message.startswith("Ambiguous value for argument '"):
        return None
    name, _, value = message.split("'")[1].partition("=")
    number = value.replace(",", "")
    fix = f"write {number} for the number, " if number.isdigit() else f"write [{value}] for a list, "
    return UserError(name, f"{value} is several values; {fix}or -m to train once with each")


def names_in(group: str) -> list[str]:
    """Return the names of the options in a dotted group; for an empty name, of all groups; none for an unknown one."""
    options = defaults()
    members = OmegaConf.select(options, group) if group else options
    return [str(name) for name in members] if OmegaConf.is_dict(members) else []


def one_line(text: str) -> str:
    """Return a message on a single line."""
    return " ".join(text.split())


# ---- recipes in files ----------------------------------------------------------------------------------


GROUP, ENDINGS = "recipe", (".yaml", ".yml")
ROOT = "# @package _global_\n"  # tells hydra that the options of a recipe are those of the job
ONE_AT_A_TIME = threading.RLock()
SEARCH = "hydra.searchpath"


def name_recipes(arguments: Sequence[str], scratch: Path) -> list[str]:
    """Return the arguments, with a recipe's path replaced by the name of a choice.

    The file is copied into the folder `scratch`, which is added to hydra's search path. Raises UserError if there is no
    such file, or if it holds no options.
    """
    replaced = list(arguments)
    for i, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option.lstrip("+") != GROUP or not value.endswith(ENDINGS):
            continue
        path = Path(value)
        if not path.is_file():
            raise UserError(GROUP, f"{value} is not a file; name one, or a choice without {path.suffix}")
        options = options_of_recipe(path, arguments)
        folder = scratch / GROUP
        folder.mkdir(parents=True, exist_ok=True)
        name = f"of_{path.stem}"  # the prefix keeps it apart from existing choices
        text = path.read_text(encoding="utf-8")
        text = text if "@package" in text else ROOT + yaml.safe_dump(options, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        replaced[i] = f"{option}={name}"
        replaced.append(f"{SEARCH}=[file://{scratch.resolve()}]")
    return replaced


def options_of_recipe(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options in a recipe's file; of a run's config.yaml, without the groups that arguments choose."""
    options = load_yaml(path)
    is_of_run = options.keys() >= {*WRITTEN}
    chosen = {group.name for group in CONF.iterdir() if group.is_dir()} & {a.partition("=")[0] for a in arguments}
    return {name: value for name, value in options.items() if not (is_of_run and name in chosen)}


# ---- composing -----------------------------------------------------------------------------------------


def compose(overrides: Sequence[str] = (), further: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return the options of the default job with `overrides`, updated with `further`; raise UserError."""
    store_defaults()
    with as_user_errors(), beside_others(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("train", list(overrides))
        composed.merge_with(further or {})
        options = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(options, dict)
    return options


@contextmanager
def beside_others() -> Iterator[None]:
    """Let hydra compose while hydra runs a job, as it does for a command line; its state is that of all threads."""
    with ONE_AT_A_TIME:
        state = GlobalHydra.instance()
        running = state.hydra
        state.hydra = None
        try:
            yield
        finally:
            state.hydra = running


@cache
def default_job() -> Mapping[str, Any]:
    """Return the options of the default job without overrides, by dotted names; a table is one option."""
    return flat(dataclasses.asdict(to_config(compose())), set(tables(Config())))


def flat(options: Mapping[str, Any], undivided: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return options by dotted names. A mapping whose name is in `undivided` stays one option."""
    flattened: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        inside = isinstance(value, Mapping) and value and name not in undivided
        flattened |= flat(value, undivided, f"{name}.") if inside else {name: value}
    return flattened


SPECIAL = re.compile(r"([\\()\[\]{}:=, \t])")  # characters of hydra's grammar


def as_override(value: Any) -> str:
    """Return a value as hydra reads it in an override: null, true, [1,2], {layers.\\[01\\]:full}."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{as_override(key)}:{as_override(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_override, value))}]"
    return SPECIAL.sub(r"\\\1", value) if isinstance(value, str) else json.dumps(value)


def to_config(options: Any) -> Config:
    """Return the options as a config; raise UserError naming the option at fault."""
    cfg = build(Config, {**options, "mesh": AUTO} if options["mesh"] == "auto" else options)
    if cfg.cluster.name == AUTO_CLUSTER.name and (figures := set(options["cluster"]) - {"name", "gpus"}):
        raise UserError(f"cluster.{min(figures)}", "goes with a named cluster; set cluster=h100, too, for example")
    return cfg
