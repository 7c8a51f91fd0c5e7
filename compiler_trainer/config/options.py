"""The conversion of mappings to typed dataclasses: unknown options are refused, and values are not coerced.

Types of options are numbers with bounds, `_target_` mappings, times (1h30m), and lengths of training (3epochs).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from compiler_trainer.config import foreign
from compiler_trainer.config.errors import UserError


@dataclass(frozen=True)
class Must:
    """The condition on a value of an annotated type; `be` completes the sentence "it must ..."."""

    be: str
    holds: Callable[[Any], bool]


Own = dict[str, Any]  # `_target_`, the dotted name of a function or class, and its arguments
Positive = Annotated[int, Must("be at least 1", lambda n: n >= 1)]
Interval = Annotated[int, Must("be at least 1 (null: never)", lambda n: n >= 1)]
Count = Annotated[int, Must("be 0 or more", lambda n: n >= 0)]
AxisSize = Annotated[int, Must("be at least 1, or -1 for the remaining ranks", lambda n: n >= 1 or n == -1)]
PositiveFloat = Annotated[float, Must("be above 0", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, Must("be 0 or more", lambda x: x >= 0)]
Fraction = Annotated[float, Must("be from 0 to 1", lambda x: 0 <= x <= 1)]
ShareOfPeak = Annotated[float, Must("be above 0 and at most 1", lambda x: 0 < x <= 1)]
AtLeastOne = Annotated[float, Must("be 1 or more", lambda x: x >= 1)]
MoreThanOne = Annotated[float, Must("be above 1", lambda x: x > 1)]
OpenFraction = Annotated[float, Must("be 0 or more and below 1", lambda x: 0 <= x < 1)]
Text = Annotated[str, Must("be at least one character", bool)]
RowLength = Annotated[int, Must("be at least 2, a token and the one it predicts", lambda n: n >= 2)]
MOST_LAYERS = 10_000
Layers = Annotated[int, Must(f"be from 1 to {MOST_LAYERS:,}", lambda n: 1 <= n <= MOST_LAYERS)]
Seed = Annotated[int, Must("be from 0 to 2,147,483,647", lambda n: 0 <= n < 2**31)]
Epsilon = Annotated[float, Must("be above 0 and at most 1", lambda x: 0 < x <= 1)]
RopeBase = Annotated[float, Must("be from 1 to 1e12", lambda x: 1 <= x <= 1e12)]


# ---- conversion ----------------------------------------------------------------------------------------


T = TypeVar("T")
MOST_SHOWN = 200  # characters of a value in an error
LARGEST = 2**63 - 1  # of int64
SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Unknown(UserError):
    """An unknown option."""


def start_lr(init: str, lora: Any) -> float:
    """Return the learning rate of `${start_lr:weights,null}`: random weights, LoRA, or all pretrained weights."""
    return 1e-3 if init == "random" else 2e-4 if lora else 1e-5


OmegaConf.register_new_resolver("start_lr", start_lr, replace=True)


@dataclass(frozen=True)
class Chosen:
    """The choice of a type by the value: `kind(value)` is the type, `words` describe all types to a reader."""

    kind: Callable[[Any], Any]
    words: str = ""


def spelled(value: Any) -> str:
    """Return an option's value as a command line takes it: JSON, but text as it is."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def build(cls: type[T], mapping: Any, where: str = "") -> T:
    """Return an instance of the dataclass `cls`, and of its nested ones; raise UserError naming the option at fault.

    `where` is the dotted name of the group. Options that are left out keep their defaults.
    """
    if isinstance(mapping, cls):
        return mapping
    names = option_names(cls)
    if not isinstance(mapping, Mapping):
        problem = f"{shown(mapping)} is not a group of options; it has {', '.join(names)}"
        raise UserError(where or "config", f"{problem}; write {join(where, 'OPTION')}=VALUE")
    for key in mapping:
        if key not in names:
            raise Unknown(join(where, key), unknown(key, names))
    for option in fields(cls):  # type: ignore[arg-type]
        if option.default is MISSING and option.default_factory is MISSING and option.name not in mapping:
            raise UserError(join(where, option.name), "is missing and has no default")
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{key: convert(hints[key], value, join(where, key)) for key, value in mapping.items()})


def convert(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as the annotation `kind`; raise UserError if it is something else."""
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
    """Return `value` as a tuple of `kinds`; (X, ...) is any number of X."""
    if not isinstance(value, list | tuple):
        fix = foreign.answer(value) if isinstance(value, str) else None
        raise UserError(where, f"{shown(value)} is not a list; {fix or f'write [{shown(value, str)}]'}")
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise UserError(where, f"{shown(list(value))} has {len(value)} entries, not {len(kinds)}")
    return tuple(convert(kinds[i], entry, f"{where}[{i}]") for i, entry in enumerate(value))


def convert_dict(kinds: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    """Return `value` as a dict of a key type and a value type."""
    if not isinstance(value, Mapping):
        answer = foreign.answer(value) if isinstance(value, str) else None
        raise UserError(where, "; ".join(filter(None, [f"{shown(value)} is not a mapping of names to values", answer])))
    return {convert(kinds[0], key, where): convert(kinds[1], entry, join(where, key)) for key, entry in value.items()}


def scalar(kind: Any, value: Any, where: str) -> Any:
    """Return `value` if it is of `kind`; a whole number also serves as a float."""
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        hint = "; put it in quotes" if kind is str and isinstance(value, int | float) else ""
        if kind is int and isinstance(value, float) and value.is_integer():
            hint = f"; write {int(value)}"
        raise UserError(where, f"{shown(value)} is not {SCALARS[kind]}{hint}")
    if kind is int and abs(value) > LARGEST:
        raise UserError(where, f"{str(value)[:20]}... must be at most {LARGEST:,}")
    return value


def one_of(choices: tuple[str, ...], value: Any, where: str) -> Any:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise UserError(where, not_one_of(choices, value, where))
    return value


def satisfying(must: Must, value: Any, where: str) -> Any:
    """Return `value` if it satisfies `must`."""
    if not must.holds(value):
        raise UserError(where, f"{shown(value, str)} must {must.be}")
    return value


def shown(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    """Return a value as text for an error: on one line, cut if it is long."""
    try:
        text = " ".join(as_text(value).split())
    except (RecursionError, ValueError):  # nested too deep, or a number of thousands of digits
        return f"a {type(value).__name__}, too large to be shown,"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def tables(options: Any) -> Iterator[str]:
    """Yield the dotted names of the tables (options of any names) in a dataclass, nested ones included."""
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, Mapping):
            yield option.name
        elif is_dataclass(value):
            yield from (join(option.name, name) for name in tables(value))


def flat(options: Mapping[str, Any], undivided: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return options by dotted names. A mapping whose name is in `undivided` stays one option."""
    flattened: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        inside = isinstance(value, Mapping) and value and name not in undivided
        flattened |= flat(value, undivided, f"{name}.") if inside else {name: value}
    return flattened


def option_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's options, in order; none for any other type."""
    return [option.name for option in fields(cls)] if is_dataclass(cls) else []


def not_one_of(choices: Collection[str], value: Any, where: str = "") -> str:
    """Return the message for a `value` of option `where` that is not one of `choices`.

    The answer to another trainer's value comes before the nearest choice.
    """
    hint = foreign.answer(str(value)) or did_you_mean(value, choices) or foreign.VALUES.get(where)
    return "; ".join(filter(None, [f"{shown(value)} is not one of {', '.join(choices)}", hint]))


def unknown(key: Any, names: list[str]) -> str:
    """Return the message for an unknown `key`, with another trainer's answer, the nearest name, or all names."""
    hint = foreign.answer(str(key)) or did_you_mean(key, names) or foreign.answer_near(str(key))
    return f"no such option; {hint}" if hint else f"no such option; there are {', '.join(names)}"


def did_you_mean(value: Any, names: Collection[str]) -> str:
    """Return a clause with the nearest of `names`, or one that begins like this; empty if none is near."""
    near = difflib.get_close_matches(str(value), list(names), n=1, cutoff=0.7)
    near += [name for name in names if value and name.startswith(str(value))]
    return f"did you mean {near[0]!r}?" if near else ""


def join(where: str, key: Any) -> str:
    """Return the dotted name of `key` in the group `where`."""
    return f"{where}.{key}" if where else str(key)


# ---- lengths of training -------------------------------------------------------------------------------


LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([KMBT]?tokens|epochs?)")
SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def is_length(text: str) -> bool:
    """Return True for a number above 0 of epochs or tokens, as `3epochs` or `1.5Btokens`."""
    match = LENGTH.fullmatch(text)
    return match is not None and float(match[1]) > 0


def steps_of(
    length: str, rows: int, rows_per_step: int, tokens_per_row: float, done: int = 0, rows_done: int = 0
) -> int:
    """Return the least number of steps for a length in epochs of `rows` sequences, or in tokens.

    `done` steps are over, in which `rows_done` sequences were trained on, maybe with another number per step.
    """
    number, unit = LENGTH.fullmatch(length).groups()  # type: ignore[union-attr]
    if unit.startswith("epoch"):
        sequences = float(number) * rows
    else:
        sequences = float(number) * SIZES[unit.removesuffix("tokens")] / tokens_per_row
    return max(1, done + max(0, math.ceil(round((sequences - rows_done) / rows_per_step, 9))))


# ---- times ---------------------------------------------------------------------------------------------


TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def is_time(time: str | float) -> bool:
    """Return True for a number of seconds above 0, or hours, minutes and seconds as `2h30m` or `45s`."""
    return seconds(time) > 0


def seconds(time: str | float) -> float:
    """Return the seconds of a time; 0 if it is not one."""
    if isinstance(time, int | float):
        return time
    match = TIME.fullmatch(time)
    return sum(int(n or 0) * size for n, size in zip(match.groups(), (3600, 60, 1))) if match else 0
