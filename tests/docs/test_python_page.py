"""The page of public Python names is complete, and their docstrings describe every parameter and field."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from doc_pages import PAGES, ROOT

import compiler_trainer
from compiler_trainer.step.results import Results
from compiler_trainer.step.step import Step

PAGE = (ROOT / "docs/reference/python.md").read_text()
COMMENT = re.compile(r"^<!-- api\n(.*?)\n-->$", re.MULTILINE | re.DOTALL)
LINES = [line.partition(":") for block in COMMENT.findall(PAGE) for line in block.splitlines()]
LISTED = {name: re.findall(r"\w+", members) for name, _, members in LINES}
IMPORTS = re.compile(r"^ *from ((?:passes|compiler_trainer)[\w.]*) import ([\w, ]+)$", re.MULTILINE)
RETURNED = (Step, Results)  # their constructors are not public
EXAMPLES = ("FoldScales",)  # a guide's reader writes it


def named(path: str) -> object:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def described() -> Iterator[tuple[str, object]]:
    """Yield each public function, class, method and property with its name."""
    for path, members in LISTED.items():
        yield path, named(path)
        for member in members:
            value = inspect.getattr_static(named(path), member)
            yield f"{path}.{member}", getattr(value, "__func__", value)


def parameters(value: object) -> list[str]:
    """Return the names that a docstring has to describe: parameters of functions and constructors, fields of dataclasses."""
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if isinstance(value, type):
        function = value.__dict__.get("__init__")
        return [] if value in RETURNED or not inspect.isfunction(function) or value.__dict__.get("_is_protocol") else parameters(function)
    if not inspect.isfunction(value):
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


@pytest.mark.parametrize(("path", "value"), [*described()], ids=lambda item: item if isinstance(item, str) else "")
def test_a_docstring_describes_each_parameter(path, value):
    text = inspect.cleandoc(value.__doc__ or "")
    assert len(text.split()) > 2, path
    is_described = {name: re.search(rf"`{name}\b|^    {name}: \S", text, re.MULTILINE) for name in parameters(value)}
    assert [name for name, match in is_described.items() if not match] == []


def test_the_page_has_all_public_names():
    assert {path.rpartition(".")[2] for path in LISTED} >= set(compiler_trainer.__all__)
    assert [name for name in compiler_trainer.__all__ if getattr(compiler_trainer, name) is not named(next(p for p in LISTED if p.endswith(f".{name}")))] == []


def test_the_page_has_all_names_that_guides_import():
    imported = {name.strip() for page in PAGES for _, names in IMPORTS.findall(page.read_text()) for name in names.split(",")}
    modules = {"ir"}
    assert len(imported) > 8 and imported - modules - {*EXAMPLES} <= {path.rpartition(".")[2] for path in LISTED}


def test_a_reader_on_github_sees_every_name():
    shown = set(re.findall(r"`(\w+)`", COMMENT.sub("", PAGE)))
    assert [path for path in LISTED if path.rpartition(".")[2] not in shown] == []
