"""The errors of hydra and omegaconf in one line, with the option and the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from compiler_trainer.config.defaults import defaults
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import not_one_of, unknown

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
        return UserError(group, not_one_of(error.options, choice))
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
