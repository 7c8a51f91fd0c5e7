"""Functions and classes of the user's: `_target_` names one, its arguments are the keys next to it, as in hydra.

An object that a `Trainer` gets in Python also becomes a `_target_` option, which finds the object again in the same
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate

from compiler_trainer.config.errors import UserError, one_line

RULES = "compiler_trainer.rules"  # the group of entry points
HANDED: dict[str, Any] = {}  # name -> object of the running `Trainer`


def given(what: str) -> Any:
    """Return an object that a `Trainer` got; raise UserError in any other process."""
    if what not in HANDED:
        raise UserError(what, "was passed to a Trainer in Python; resume with the script that did so")
    return HANDED[what]


GIVEN = f"{__name__}.{given.__name__}"


def is_given(options: Mapping[str, Any]) -> bool:
    """Return True if the options stand for an object that a `Trainer` got."""
    return options.get("_target_") == GIVEN


def name_of(options: Mapping[str, Any]) -> str:
    """Return the name of the user's object."""
    return (
        str(options["what"]).partition(": ")[2] if is_given(options) and "what" in options else str(options["_target_"])
    )


@contextmanager
def handed(objects: Mapping[str, Any]) -> Iterator[None]:
    """Register the objects of a `Trainer` while the context lasts."""
    HANDED.update(objects)
    try:
        yield
    finally:
        for name in objects:
            del HANDED[name]


def called(options: Mapping[str, Any], where: str) -> Any:
    """Call `_target_` with its arguments; raise UserError with the cause of a failure."""
    try:
        return instantiate(dict(options), _convert_="all")
    except InstantiationException as error:
        raise refusal(error, where, options) from error


def function(options: Mapping[str, Any], where: str) -> Callable[..., Any]:
    """Return the function that `_target_` names, with its arguments bound by name; raise UserError."""
    if is_given(options):
        return given(options["what"])
    arguments = {key: value for key, value in options.items() if key != "_target_"}
    try:
        target: Callable[..., Any] = get_method(options["_target_"])
    except (ImportError, ValueError) as error:
        raise refusal(error, where, options) from error
    return partial(target, **arguments) if arguments else target


def import_rules(names: Sequence[str]) -> list[ModuleType]:
    """Import and return the modules that add rules for operators: those in `names`, and those of installed packages.

    A package names its module as an entry point of the group `compiler_trainer.rules`. Raises UserError.
    """
    installed = sorted({entry.module for entry in entry_points(group=RULES)})
    modules = []
    for name in (*installed, *names):
        where = "passes.rules" if name in names else f"the entry point {name} of {RULES}"
        try:
            modules.append(import_module(name))
        except ImportError as error:
            hint = "; put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
            raise UserError(where, f"{name} cannot be imported: {error}{hint}") from error
    return modules


def refusal(error: Exception, where: str, options: Mapping[str, Any]) -> UserError:
    """Return the first cause of an error on one line, without hydra's advice; a missing module gets a hint."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, UserError):
        cause = cause.__cause__
    if isinstance(cause, UserError):
        return cause
    hint = "; put the folder of its file on PYTHONPATH" if isinstance(cause, ModuleNotFoundError) else ""
    module, _, name = str(options["_target_"]).rpartition(".")
    if "is not a package" in str(cause) and module != "__main__":
        return UserError(f"{where}._target_", f"{module} has no {name}")
    if module == "__main__":
        hint = f"; {options['_target_']} is defined in a script: resume with that script, or move it into a module"
    return UserError(f"{where}._target_", f"{type(cause).__name__}: {one_line(cause)}{hint}")
