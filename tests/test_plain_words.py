"""The rules of plain English that a syntax tree can check, for all code and all pages; there are no exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("passes", "compiler_trainer", "tools", "tests")
PAGES = sorted({*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "passes/README.md"})
BEGINNINGS = "What Whether How Where Which Whose Those Of That When Why"
NAMES = "found held told given said kept asked meant made_of of_config"
PHRASES = re.compile(
    r"where there (?:is|are)|\bwhich is said\b|\bit is said\b|\banew\b|\bso manieth\b|\bbe it\b|\bas it were\b|\bof what is\b", re.I
)


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_names_are_plain(room):
    wrong = []
    for path in sorted((ROOT / room).rglob("*.py")):
        tree, place = ast.parse(path.read_text()), path.relative_to(ROOT)
        for line, text in documented(tree):
            if (first := text.split()[0]) in BEGINNINGS.split():
                wrong.append(f"{place}:{line}: a docstring begins with {first!r}")
            wrong += [f"{place}:{line}: a docstring says {phrase!r}" for phrase in PHRASES.findall(text)]
        wrong += [f"{place}:{line}: {name!r} is no noun" for line, name in names(tree) if name in NAMES.split()]
    assert not wrong, f"{len(wrong)} places:\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain(page):
    assert not PHRASES.findall(page.read_text())
