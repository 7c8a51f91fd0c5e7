"""The default job with overrides, composed by hydra, and the errors of hydra and omegaconf in one line."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
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

from compiler_trainer.config import foreign, short_names
from compiler_trainer.config.cluster import AUTO_CLUSTER
from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.files import CONF, check_folder
from compiler_trainer.config.jobs import NO_KEY, QUOTED_KEY, TABLES, with_files
from compiler_trainer.config.options import build, flat, not_one_of, tables, unknown
from compiler_trainer.config.schema import AUTO, AUTOMATIC, Config, ModelConfig, open_axes

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
    "model.path": "goes with model=hf; model=FOLDER, or model=ORGANIZATION/NAME of the hub, sets both",
    "model.lora": "goes with recipe=lora model=FOLDER, or a model of the hub",
    "model.quantize": "goes with recipe=qlora model=FOLDER, or a model of the hub",
    "model.init": "goes with model=FOLDER, or a model of the hub",
}
MEANT = (  # group, a mark of values that are no choice of it, the fix
    ("recipe", ".y", "{0} is a job file, which is given by itself: compiler-trainer {0}"),
    ("data", ".", "{0} is a file; write data=text 'data.files=[{0}]', for conversations also data.chat=true"),
)
INPUT_ERRORS = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # hydra raises the last
OVERRIDDEN = re.compile(r"Could not override '([^']+)'")
LECTURES = ("See https://hydra.cc", "\n\n")  # begin hydra's explanation of its grammar


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Raise UserError for hydra's errors inside the context."""
    try:
        yield
    except INPUT_ERRORS as error:
        raise user_error(error) from None  # hydra's own traceback has fifty lines


def user_error(error: Exception) -> UserError:
    """Return an error of composing as a UserError of one line."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OverrideParseException):
        return UserError(error.override, unreadable(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        path = error.missing_cfg_file  # of hydra/launcher, or of a group of ours with a choice that may have slashes
        group, _, choice = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
        answer = next((fix for name, part, fix in MEANT if name == group and part in choice), None)
        return UserError(group, answer.format(choice) if answer else not_one_of(error.options, choice, group))
    cause = error.__cause__ or error
    if not isinstance(cause, OmegaConfBaseException):
        return several_values(error) or UserError("config", one_line(str(error)))
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        whole = OVERRIDDEN.match(str(error))  # omegaconf names the first part that does not exist
        return no_option(whole[1] if whole else cause.full_key)
    if isinstance(cause, MissingMandatoryValue) and cause.full_key:
        name = cause.full_key
        return UserError(name, f"must be given, as {name}=VALUE; compiler-trainer --help {name} describes it")
    return UserError(cause.full_key or "config", str(cause).partition("\n")[0])


def no_option(name: str) -> UserError:
    """Return the error for an unknown option, with the name or group that it has here, or the choice it goes with."""
    group, _, key = name.rpartition(".")
    if name in GOES_WITH:
        return UserError(name, GOES_WITH[name])
    if group in every_name():
        return UserError(name, f"no such option; {group} is a single value: write {group}=VALUE")
    elsewhere = [other for other in every_name() if other.rpartition(".")[2] == key]
    if elsewhere and not foreign.answer(key):
        return UserError(name, f"no such option; there is {' and '.join(elsewhere[:3])}")
    if not names_in(group) and not foreign.answer(key):
        key, group = group, ""  # the group is not one of ours
    return UserError(name, unknown(key, names_in(group) or names_in("")))


def no_flag(name: str, value: str) -> str:
    """Return the message for an unknown flag, which may be an option of this or of another trainer."""
    if name in every_name():
        return f"options have no dashes; write {name}={value or 'VALUE'}"
    answer = foreign.answer(name) or foreign.answer_near(name)
    return f"options are OPTION=VALUE, without dashes; {answer or 'compiler-trainer --help lists options and flags'}"


def no_value(word: str) -> str:
    """Return the message for a word that is neither a verb nor OPTION=VALUE."""
    if word in every_name():
        return f"has no value; write {word}=VALUE, without spaces"
    form = "is not of the form OPTION=VALUE; a verb comes first, options alone train a model: compiler-trainer --help"
    return foreign.answer(word) or form


def every_name() -> list[str]:
    """Return the names of all options of the default job."""
    options: Any = OmegaConf.to_container(defaults(), resolve=False)
    return [*flat(options, TABLES), *short_names.CHOICES]


def unreadable(error: OverrideParseException) -> str:
    """Return the reason why an override cannot be read."""
    name, is_option, value = error.override.partition("=")
    if not is_option:
        return no_value(name)
    if any(value.count(begin) > value.count(end) for begin, end in ("[]", "{}")):
        return f"has no closing bracket; put '{name}=...' in quotes, because the shell splits at spaces"
    if not name.isascii():
        return "is not the name of an option, which has letters from a to z"
    if key := QUOTED_KEY.search(value):
        return f"{key[1]} {NO_KEY}"
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
    short = [name.rpartition(".")[2] for name in short_names.CHOICES if name.rpartition(".")[0] == group]
    return [*map(str, members), *short] if OmegaConf.is_dict(members) else []


# ---- composing -----------------------------------------------------------------------------------------


ONE_AT_A_TIME = threading.RLock()


def compose(overrides: Sequence[str] = (), further: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return the options of the default job with `overrides` and job files, updated with `further`; raise UserError."""
    store_defaults()
    with as_user_errors(), beside_others(), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("train", with_files(overrides))
        composed.merge_with(further or {})
        options = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(options, dict)
    return options


def search_path(folder: Path | None) -> list[str]:
    """Return the override that adds a folder of the user's choices; raise UserError if a file in it is no config."""
    if folder is None:
        return []
    check_folder(folder)
    return [f"hydra.searchpath=[file://{folder.resolve()}]"]


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


def to_config(options: Any) -> Config:
    """Return the options as a config; raise UserError naming the option at fault."""
    named = short_names.with_loggers(options)
    cfg = build(Config, {**named, "mesh": AUTO} if options["mesh"] == "auto" else named)
    if cfg.train.batch_per_rank is not None:
        cfg = without_microbatches(cfg)
    if cfg.cluster.name == AUTO_CLUSTER.name and (figures := set(options["cluster"]) - {"name", "gpus"}):
        raise UserError(f"cluster.{min(figures)}", "goes with a named cluster; set cluster=h100, too, for example")
    return cfg


def without_microbatches(cfg: Config) -> Config:
    """Return `cfg`, whose `train.batch_per_rank` decides on microbatches; raise UserError if something else does."""
    if len(open_axes(cfg.mesh)) > 1:
        raise UserError("train.batch_per_rank", "goes with a mesh, and this one is planned; leave it out, or set mesh")
    if cfg.train.microbatches not in (1, AUTOMATIC):
        problem = f"decides, and so does train.microbatches={cfg.train.microbatches}"
        raise UserError("train.batch_per_rank", f"{problem}; leave out one of them")
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, microbatches=1))
