"""The descriptions of options for `--help`: comments after fields and docstrings of groups in the schema."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compiler_trainer.config import cluster, foreign, schema
from compiler_trainer.config.compose import CONF, default_job
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import SCALARS, Chosen, Must, spelled

PLAIN = {"None": "null", "Any": "anything", **{kind.__name__: words for kind, words in SCALARS.items()}}


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
    lines, notes = source_of(cls), comments(cls)
    inner: list[tuple[str, type, bool]] = []
    options = []
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if parts := parts_of(lines[field.name]):
            inner += [(name, part, in_default_job and part is parts[0]) for part in parts]
        else:
            default = shown(field, name if in_default_job else "")
            options.append(Option(name, lines[field.name], default, notes[field.name]))
    yield Group(prefix.rstrip("."), inspect.cleandoc(cls.__doc__ or ""), options)
    for name, part, is_chosen in inner:
        yield from groups(part, f"{name}.", is_chosen)


def parts_of(annotation: str) -> tuple[type, ...]:
    """Return the dataclasses of options that an annotation names, the default job's first."""
    first = annotation.split("|")[0].strip()
    if first == "Loss":
        return tuple(schema.LOSSES.values())
    names = ("ModelConfig", "FolderConfig") if first == "Model" else (first,)
    return tuple(
        part for part in map(schema_object, names) if dataclasses.is_dataclass(part) and isinstance(part, type)
    )


def schema_object(name: str) -> Any:
    """Return the object with an annotation's name in the schema, None if there is none."""
    return next((vars(module)[name] for module in (schema, cluster) if name in vars(module)), None)


def source_of(cls: type) -> dict[str, str]:
    """Return field -> its annotation in words, as written in the class or one that it inherits from."""
    annotations: dict[str, str] = {}
    for owner in owners(cls):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        fields = [line for line in tree.body if isinstance(line, ast.AnnAssign)]
        annotations |= {ast.unparse(field.target): words(field.annotation) for field in fields}
    return annotations


def owners(cls: type) -> list[type]:
    """Return the dataclasses whose fields a dataclass has, the dataclass itself last."""
    return [owner for owner in reversed(cls.__mro__) if dataclasses.is_dataclass(owner)]


def words(annotation: ast.expr) -> str:
    """Return an annotation in the words of a command line; listed values are given as they are."""
    if isinstance(annotation, ast.BinOp):
        return f"{words(annotation.left)} | {words(annotation.right)}"
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return words_of_several(ast.unparse(annotation.value), inner)
    return words_of_name(ast.unparse(annotation))


def words_of_several(kind: str, inner: list[ast.expr]) -> str:
    """Return `Literal["a", "b"]`, `tuple[str, ...]`, `tuple[int, int]` or `dict[str, int]` in words."""
    if kind == "Literal":
        return " | ".join(map(ast.literal_eval, inner))
    if kind == "dict":
        return f"by name: {words_of_each(inner[1])}"
    is_open = ast.unparse(inner[-1]) == "..."
    return f"list of {'' if is_open else f'{len(inner)}, each '}{words_of_each(inner[0])}"


def words_of_each(annotation: ast.expr) -> str:
    """Return the type of a list's or table's elements in words; for a group of options, their names."""
    group = schema_object(ast.unparse(annotation))
    if dataclasses.is_dataclass(group):
        return f"{{{', '.join(field.name for field in dataclasses.fields(group))}}}"
    return words(annotation)


def words_of_name(name: str) -> str:
    """Return the words for a name in an annotation: `Positive` is `a whole number, at least 1`."""
    alias = schema_object(name)
    if get_origin(alias) is Literal:
        return " | ".join(get_args(alias))
    kind, *marks = get_args(alias) or (None,)
    phrases = [mark.words for mark in marks if isinstance(mark, Chosen) and mark.words]
    phrases += [mark.be.removeprefix("be ").removeprefix("have ") for mark in marks if isinstance(mark, Must)]
    if kind in (int, float, str) and not isinstance(marks[0], Chosen):
        phrases.insert(0, SCALARS[kind])
    return ", ".join(phrases) or PLAIN.get(name, name)


def comments(cls: type) -> dict[str, str]:
    """Return field -> the comment after it."""
    texts: dict[str, str] = dict.fromkeys((field.name for field in dataclasses.fields(cls)), "")
    for line in (line for owner in owners(cls) for line in inspect.getsource(owner).splitlines()):
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


def explain(query: str, out: Console) -> None:
    """Print a group of options, a single option, or the options about a word, which may be another trainer's.

    Raises UserError if there are none.
    """
    all_groups = list(groups())
    chosen = [group for group in all_groups if query in ("", group.name) or group.name.startswith(f"{query}.")]
    chosen = chosen or having(all_groups, lambda option: option.name == query)
    answer = None if chosen else foreign.answer(query)
    if answer:
        out.print(f"{query}: {answer}", markup=False)
    chosen = chosen or about(all_groups, query)
    if not chosen and not answer:
        names = [group.name for group in all_groups] + [option.name for group in all_groups for option in group.options]
        near = difflib.get_close_matches(query, names, 1, 0.5)
        raise UserError(
            query, f"no option has this name or is about it{f'; did you mean {near[0]!r}?' if near else ''}"
        )
    for group in chosen:
        show(group, out)


def having(all_groups: list[Group], predicate: Callable[[Option], bool]) -> list[Group]:
    """Return the groups that have options for which `predicate` is True, with these options only."""
    chosen = [group._replace(options=[option for option in group.options if predicate(option)]) for group in all_groups]
    return [group for group in chosen if group.options]


def about(all_groups: list[Group], query: str) -> list[Group]:
    """Return the options whose name or description has all the words, and whole groups whose description has them."""
    words = query.lower().replace("_", " ").split()

    def says(text: str) -> bool:
        """Return True if a text has all the words."""
        return all(word in text.lower().replace("_", " ") for word in words)

    is_about = {group.name: says(group.about) for group in all_groups}
    matches = [
        group
        if is_about[group.name]
        else group._replace(options=[o for o in group.options if says(f"{o.name} {o.meaning}")])
        for group in all_groups
    ]
    return [group for group in matches if group.options]


def show(group: Group, out: Console) -> None:
    """Print a group of options."""
    out.print(f"\n[bold]{group.name}[/bold]  {escape(group.about)}")
    if (CONF / group.name).is_dir():
        out.print(f"  choices: {', '.join(sorted(path.stem for path in (CONF / group.name).glob('*.yaml')))}")
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("option", no_wrap=True)
    for title in ("takes", "default", ""):
        table.add_column(title, overflow="fold")
    for option in group.options:
        table.add_row(option.name, *(escape(text) for text in option[1:]))
    out.print(table)
