"""Which way imports go, and the one file that private PyTorch API may be used in."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRIVATE_API = "passes/torch_private.py"
PASSES = sorted(ROOT.glob("passes/**/*.py"))
SOURCES = [*PASSES, *sorted(ROOT.glob("compiler_trainer/**/*.py"))]
OPERATORS = "torch.ops."  # operators are reached by namespace, and some namespaces start with _


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names a module imports, with what it takes out of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.Module) -> Iterator[str]:
    """Dotted chains of names, `torch.x.y`, that a module spells out."""
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(names)])


def is_private_torch(name: str) -> bool:
    """Whether a dotted name goes through a part of torch with a leading underscore, `__version__` and alike aside."""
    if name.split(".")[0] != "torch" or name.startswith(OPERATORS):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("torch.__version__", False),
        ("torch._dynamo", True),
        ("torch.fx._symbolic_trace.is_fx_tracing", True),
        ("torch.nn.functional", False),
        ("torch.ops._c10d_functional.wait_tensor", False),
        ("torchless._x", False),
    ],
)
def test_private_names_are_told_apart(name, private):
    assert is_private_torch(name) == private


SOLVERS = {"passes/budget.py": {"numpy", "scipy"}}


@pytest.mark.parametrize("path", PASSES, ids=relative)
def test_passes_import_torch_and_themselves_only(path):
    allowed = {"torch", "passes", *sys.stdlib_module_names} | SOLVERS.get(relative(path), set())
    assert {name.split(".")[0] for name in imported(ast.parse(path.read_text()))} <= allowed


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p) != PRIVATE_API], ids=relative)
def test_private_torch_is_used_in_one_file_only(path):
    tree = ast.parse(path.read_text())
    assert not sorted({name for name in [*imported(tree), *attributes(tree)] if is_private_torch(name)})


def test_the_one_file_says_which_versions_it_was_checked_on():
    assert "2.13" in (ROOT / PRIVATE_API).read_text()
