"""The descriptions of options for `--help`: comments after fields and docstrings of groups in the schema."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from compiler_trainer.config import foreign, schema, short_names
from compiler_trainer.config.compose import default_job
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.options import SCALARS, Chosen, did_you_mean, option_names, spelled


class Option(NamedTuple):
    """An option: its dotted name, the values it takes, its default, and its description (may be empty)."""

    name: str
    takes: str
    default: str
    meaning: str


class Group(NamedTuple):
    """A group of options, and its description."""

    name: str
    about: str
    options: list[Option]


def groups(cls: type = schema.Config, prefix: str = "", in_default_job: bool = True) -> Iterator[Group]:
    """Yield every group of options below a dataclass of the schema, the dataclass's own group first.

    Defaults are those of the default job, or of the schema for a choice that the default job does not make.
    """
    types, notes = types_of(cls), comments(cls)
    inner: list[tuple[str, type, bool]] = []
    options = []
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if parts := parts_of(types[field.name]):
            inner += [(name, part, in_default_job and part is parts[0]) for part in parts]
        else:
            default = shown(field, name if in_default_job else "")
            options.append(Option(name, words(types[field.name]), default, notes[field.name]))
    yield Group(prefix.rstrip("."), inspect.cleandoc(cls.__doc__ or ""), options + with_short_names(prefix))
    for name, part, is_chosen in inner:
        yield from groups(part, f"{name}.", is_chosen)


def with_short_names(prefix: str) -> list[Option]:
    """Return the options of a group that stand for others."""
    names = [name for name in short_names.CHOICES if prefix and name.startswith(prefix)]
    return [Option(name, " | ".join(short_names.choices(name)), "null", meaning(name)) for name in names]


def meaning(name: str) -> str:
    """Return the description of an option that stands for others, with their names."""
    return f"{short_names.CHOICES[name]}; stands for {', '.join(sorted(short_names.targets(name)))}"


def types_of(cls: type) -> dict[str, Any]:
    """Return field -> its type, with conditions and choices."""
    return get_type_hints(cls, include_extras=True)


def parts_of(kind: Any) -> tuple[type, ...]:
    """Return the dataclasses of options that a type stands for, the default job's first."""
    if kind == schema.Loss:
        return tuple(schema.LOSSES.values())
    union = get_args(kind)[0] if kind == schema.Model else kind
    kinds = get_args(union) if get_origin(union) in (Union, UnionType) else (union,)
    return tuple(part for part in kinds if dataclasses.is_dataclass(part) and isinstance(part, type))


def words(kind: Any) -> str:
    """Return a type in the words of a command line: `Positive` is `a whole number, at least 1`."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return f"{{{', '.join(option_names(kind))}}}"
    if origin is Annotated and isinstance(args[1], Chosen):
        return args[1].words
    if origin is Annotated:
        condition = args[1].be.removeprefix("be ").removeprefix("have ")
        return f"{SCALARS[args[0]]}, {condition}" if args[0] in SCALARS else condition
    if origin is Literal:
        return " | ".join(args)
    if origin in (Union, UnionType):
        return " | ".join(map(words, args))
    if origin is dict:
        return f"by name: {words(args[1])}"
    if origin is tuple:
        return f"list of {'' if args[-1] is ... else f'{len(args)}, each '}{words(args[0])}"
    return {NoneType: "null", Any: "anything", **SCALARS}[kind]


@functools.cache
def text_of(cls: type) -> str:
    """Return the source of a class."""
    return inspect.getsource(cls)


def owners(cls: type) -> list[type]:
    """Return the dataclasses whose fields a dataclass has, the dataclass itself last."""
    return [owner for owner in reversed(cls.__mro__) if dataclasses.is_dataclass(owner)]


def comments(cls: type) -> dict[str, str]:
    """Return field -> the comment after it."""
    texts: dict[str, str] = dict.fromkeys((field.name for field in dataclasses.fields(cls)), "")
    for line in (line for owner in owners(cls) for line in text_of(owner).splitlines()):
        name, _, annotation = line.strip().partition(":")
        if name in texts and "  # " in annotation:
            texts[name] = annotation.rpartition("  # ")[2]
    return texts


def shown(field: dataclasses.Field[Any], name: str) -> str:
    """Return an option's default as on a command line: the default job's value, otherwise the schema's."""
    if name in default_job():
        return spelled(default_job()[name])
    if field.default is field.default_factory is dataclasses.MISSING:
        return "(required)"
    return spelled(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())


# ---- help ----------------------------------------------------------------------------------------------


def choices_of(group: str) -> list[str]:
    """Return the names of a group's choices; none if it has no choices."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml")) if group else []


def summary(group: str, choice: str) -> str:
    """Return the first sentence of the comment at the head of a choice's file, without references."""
    lines = (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines()
    text = " ".join(line[2:] for line in lines if line.startswith("# ") and "@package" not in line)
    return re.split(r"\. |: | \(arXiv", text, maxsplit=1)[0].rstrip(".")


def recipes() -> Group:
    """Return the recipes as a group."""
    listed = [Option(f"recipe={name}", "", "", summary("recipe", name)) for name in choices_of("recipe")]
    about = "Settings of a whole job by one name; `compiler-trainer new RECIPE > job.yaml` writes a file to start from."
    return Group("recipe", about, listed)


def explain(query: str, columns: int) -> Iterator[str]:
    """Yield lines on a group of options, an option, or those about a word or a value, which may be another trainer's.

    Raises UserError if there are none.
    """
    all_groups = [*groups(), recipes()]
    chosen = [group for group in all_groups if query in ("", group.name) or group.name.startswith(f"{query}.")]
    chosen = chosen or having(all_groups, lambda option: option.name == query)
    answer = None if chosen else foreign.answer(query)
    if answer:
        yield from wrap(f"{query}: {answer}", columns)
    chosen = chosen or about(all_groups, query)
    if not chosen and not answer:
        names = [group.name for group in all_groups] + [option.name for group in all_groups for option in group.options]
        hint = did_you_mean(query, names)
        raise UserError(query, "; ".join(filter(None, ["no option has this name or is about it", hint])))
    for group in chosen:
        yield from lines_of_group(group, columns)


def having(all_groups: list[Group], predicate: Callable[[Option], bool]) -> list[Group]:
    """Return the groups that have options for which `predicate` is True, with these options only."""
    chosen = [group._replace(options=[option for option in group.options if predicate(option)]) for group in all_groups]
    return [group for group in chosen if group.options]


def about(all_groups: list[Group], query: str) -> list[Group]:
    """Return the options whose name, values or description have all the words, and whole groups about them."""
    words = query.lower().replace("_", " ").split()

    def says(text: str) -> bool:
        """Return True if a text has all the words."""
        return all(word in text.lower().replace("_", " ") for word in words)

    matches = [
        group
        if says(group.about)
        else group._replace(options=[o for o in group.options if says(f"{o.name} {o.takes} {o.meaning}")])
        for group in all_groups
    ]
    return [group for group in matches if group.options]


def lines_of_group(group: Group, columns: int) -> Iterator[str]:
    """Yield the lines of a group of options."""
    yield ""
    yield from wrap(f"{group.name}: {' '.join(group.about.split())}", columns)
    if group.name != "recipe" and (choices := choices_of(group.name)):
        yield from wrap(f"choices: {', '.join(choices)}", columns, 2)
    for option in group.options:
        yield from wrap(f"{option.name}={option.default}" if option.takes else option.name, columns, 2)
        yield from wrap(f"takes {option.takes}" if option.takes else "", columns, 6)
        yield from wrap(option.meaning, columns, 6)


def wrap(text: str, columns: int, indent: int = 0) -> list[str]:
    """Return a text as lines of at most `columns` characters, indented, later ones by two more; none for no text."""
    begin = " " * indent
    return textwrap.wrap(text, columns, initial_indent=begin, subsequent_indent=f"{begin}  ", break_on_hyphens=False)
