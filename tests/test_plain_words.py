"""Rules of plain English that a syntax tree can check: docstrings and pages everywhere, names in the product's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("passes", "compiler_trainer", "tools")
PAGES = sorted({*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "passes/README.md"})
BEGINNINGS = "What Whether How Where Which Whose Those Of That When Why"
NAMES = "found held told given said kept asked meant took made_of of_config"
PHRASES = re.compile(
    r"where there (?:is|are)|\bwhich is said\b|\bit is said\b|\banew\b|\bso manieth\b|\bbe it\b|\bas it were\b|\bof what is\b", re.I
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def trees(room: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the path and the syntax tree of each file of a room."""
    for path in sorted((ROOT / room).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


@pytest.mark.parametrize("room", [*PRODUCT, "tests"])
def test_docstrings_are_plain(room):
    wrong = []
    for path, tree in trees(room):
        for line, text in docstrings(tree):
            phrases = [word for word in BEGINNINGS.split() if text.split()[0] == word] + PHRASES.findall(text)
            wrong += [f"{path}:{line}: {phrase!r}" for phrase in phrases]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", PRODUCT)
def test_variables_and_parameters_are_nouns(room):
    wrong = [f"{path}:{line}: {name!r}" for path, tree in trees(room) for line, name in variables(tree) if name in NAMES.split()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain(page):
    assert not PHRASES.findall(page.read_text())
