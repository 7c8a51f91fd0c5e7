"""The page docs/internals/one-step.md names functions in few files, and each calls the next."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/internals/one-step.md"
STOP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
MOST_FILES = 8


def function(file: str, name: str) -> ast.FunctionDef:
    """Return the definition of a function or method; fail if the file has none of that name."""
    body = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        (node,) = [item for item in body if isinstance(item, ast.FunctionDef | ast.ClassDef) and item.name == part]
        body = node.body
    assert isinstance(node, ast.FunctionDef)
    return node


def called(stop: ast.FunctionDef) -> set[str]:
    """Return the names of everything that a function refers to."""
    names = {node.attr for node in ast.walk(stop) if isinstance(node, ast.Attribute)}
    return names | {node.id for node in ast.walk(stop) if isinstance(node, ast.Name)}


def test_each_stop_calls_the_next():
    for section in PAGE.read_text().split("\n## ")[1:]:
        stops = STOP.findall(section)
        assert len(stops) > 2, section
        for (file, name), (_, following) in zip(stops, stops[1:]):
            assert following.rpartition(".")[2] in called(function(file, name)), f"{file} {name} -> {following}"


def test_each_section_begins_where_another_stop_calls_it():
    """The trainer compiles the step and runs its steps."""
    assert "compile_step" in called(function("compiler_trainer/training/trainer.py", "build_step"))
    assert "records" in called(function("compiler_trainer/training/trainer.py", "run"))
    assert "run" in called(function("compiler_trainer/training/trainer.py", "train"))


def test_few_files_lie_between_the_command_and_the_loss():
    assert len({file for file, _ in STOP.findall(PAGE.read_text())}) <= MOST_FILES
