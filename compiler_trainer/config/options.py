"""Mappings to typed dataclasses: nothing unknown, nothing converted that would change what was written."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from compiler_trainer.config import foreign
from compiler_trainer.config.errors import UserError

T = TypeVar("T")
MOST_SHOWN = 200  # characters of a value in an error
LARGEST = 2**63 - 1  # whole numbers, which int64 holds
SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Unknown(UserError):
    """An option that there is not."""


def start_lr(init: str, lora: Any) -> float:
    """`${start_lr:weights,null}`: the learning rate that a folder's weights take, trained whole or by LoRA, or anew."""
    return 1e-3 if init == "random" else 2e-4 if lora else 1e-5


OmegaConf.register_new_resolver("start_lr", start_lr, replace=True)


@dataclass(frozen=True)
class Must:
    """What a value of an annotated type has to satisfy: `be` completes the sentence "it must ..."."""

    be: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Chosen:
    """How the kind of an annotated value is chosen: `kind(value)` is what it has to be, `words` say so to a reader."""

    kind: Callable[[Any], Any]
    words: str = ""


def spelled(value: Any) -> str:
    """An option's value as a command line takes it: null for None, and quotes around no text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def build(cls: type[T], mapping: Any, where: str = "") -> T:
    """An instance of the dataclass `cls`, its nested ones built alike; raises UserError naming the option at fault.

    `where` is the dotted name of the group. Options left out keep their defaults.
    """
    if isinstance(mapping, cls):
        return mapping
    names = option_names(cls)
    if not isinstance(mapping, Mapping):
        raise UserError(where or "config", f"{shown(mapping)} is not a group of options; it has {', '.join(names)}")
    for key in mapping:
        if key not in names:
            raise Unknown(join(where, key), unknown(key, names))
    for option in fields(cls):  # type: ignore[arg-type]
        if option.default is MISSING and option.default_factory is MISSING and option.name not in mapping:
            raise UserError(join(where, option.name), "is missing and has no default")
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{key: convert(hints[key], value, join(where, key)) for key, value in mapping.items()})


def convert(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotation `kind`; raises UserError if it is something else."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    if kind is Any:
        return value
    if origin is Annotated and isinstance(args[1], Chosen):
        return value if is_dataclass(value) else convert(args[1].kind(value), value, where)
    if origin is Annotated:
        return satisfying(args[1], convert(args[0], value, where), where)
    if origin is Literal:
        return one_of(args, value, where)
    if origin in (Union, UnionType):  # only `X | None` is used
        return None if value is None else convert(args[0], value, where)
    if origin is tuple:
        return convert_list(args, value, where)
    if origin is dict:
        return convert_dict(args, value, where)
    return scalar(kind, value, where)


def convert_list(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """`value` as a tuple of `kinds`, where (X, ...) is any number of X."""
    if not isinstance(value, list | tuple):
        raise UserError(where, f"{shown(value)} is not a list; write [{shown(value, str)}]")
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise UserError(where, f"{shown(list(value))} has {len(value)} entries, not {len(kinds)}")
    return tuple(convert(kinds[i], entry, f"{where}[{i}]") for i, entry in enumerate(value))


def convert_dict(kinds: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    """`value` as a dict of a key type and a value type."""
    if not isinstance(value, Mapping):
        raise UserError(where, f"{shown(value)} is not a mapping of names to values")
    return {convert(kinds[0], key, where): convert(kinds[1], entry, join(where, key)) for key, entry in value.items()}


def scalar(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of `kind`; a whole number also serves as a float."""
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        hint = "; put it in quotes" if kind is str and isinstance(value, int | float) else ""
        raise UserError(where, f"{shown(value)} is not {SCALARS[kind]}{hint}")
    if kind is int and abs(value) > LARGEST:
        raise UserError(where, f"{str(value)[:20]}... must be at most {LARGEST:,}")
    return value


def one_of(choices: tuple[str, ...], value: Any, where: str) -> Any:
    """`value` if it is one of `choices`."""
    if value not in choices:
        raise UserError(where, "; ".join([not_one_of(choices, value), *filter(None, [foreign.VALUES.get(where)])]))
    return value


def satisfying(must: Must, value: Any, where: str) -> Any:
    """`value` if it satisfies `must`."""
    if not must.holds(value):
        raise UserError(where, f"{shown(value, str)} must {must.be}")
    return value


def shown(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    """A value as an error shows it: on one line, its beginning where it is long."""
    try:
        text = " ".join(as_text(value).split())
    except (RecursionError, ValueError):  # nested too deep, or a number of thousands of digits
        return f"a {type(value).__name__}, too large to be shown,"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def tables(options: Any) -> Iterator[str]:
    """Dotted names of the tables (options of any names) in an instance of a dataclass, its nested ones included."""
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, Mapping):
            yield option.name
        elif is_dataclass(value):
            yield from (join(option.name, name) for name in tables(value))


def option_names(cls: Any) -> list[str]:
    """Names of the options of a dataclass, in order; none for any other type."""
    return [option.name for option in fields(cls)] if is_dataclass(cls) else []


def not_one_of(choices: Iterable[str], value: Any) -> str:
    """What to say of a `value` that is none of `choices`."""
    return f"{shown(value)} is not one of {', '.join(choices)}{did_you_mean(value, choices)}"


def unknown(key: Any, names: list[str]) -> str:
    """What to say of an unknown `key`: what another trainer's is called here, the nearest name, else all of them."""
    if found := foreign.answer(str(key)):
        return f"no such option; {found}"
    known = f"; there are {', '.join(names)}" if names else ""
    return "no such option" + (did_you_mean(key, names) or known)


def did_you_mean(value: Any, names: Iterable[str]) -> str:
    """A closing half-sentence with the nearest of `names`, empty if none is near."""
    near = difflib.get_close_matches(str(value), list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def join(where: str, key: Any) -> str:
    """Dotted name of `key` in the group `where`."""
    return f"{where}.{key}" if where else str(key)
