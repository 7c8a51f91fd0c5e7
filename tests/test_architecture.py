"""The direction of imports between rooms, and the one file that may use private PyTorch API."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRIVATE_API = "passes/torch_private.py"
PASSES = sorted(ROOT.glob("passes/**/*.py"))
SOURCES = [*PASSES, *sorted(ROOT.glob("compiler_trainer/**/*.py"))]
# From the lowest floor up: a room imports from itself and from lower floors, not from its neighbours.
FLOORS = {
    "passes": (
        ("signals",),
        ("torch_private",),
        ("ops",),
        ("ir",),
        ("trace",),
        ("rules",),
        ("context",),
        ("precision", "cost"),
        ("communication", "memory", "pipeline"),
        ("sharding",),
        ("idioms",),
        ("update", "autograd", "lower"),
        ("check",),
    ),
    "compiler_trainer": (
        ("config", "console", "page"),
        ("indexers", "places", "recurrences", "request", "widths"),
        ("capture", "models", "pipeline"),
        ("data", "step"),
        ("checkpoint",),
        ("elastic",),
        ("training", "parity"),
        ("planning", "runs", "inspect", "sweep", "calibrate", "doctor"),
        ("bisect", "profile"),
        ("cli",),
        ("__main__", "train", "api"),
    ),
}
# These files import when needed, or for types only: torch, Inductor, SciPy and all passes are slow to import, submitit is an extra.
# The files of cli/ import late, because only the parsed command line shows which modules it needs.
LATE_IMPORTS = {
    *(str(path.relative_to(ROOT)) for path in ROOT.glob("compiler_trainer/cli/*.py")),
    "compiler_trainer/__init__.py",
    "compiler_trainer/cli/verbs/compile.py",
    "compiler_trainer/cli/verbs/plan.py",
    "compiler_trainer/step/compile.py",
    "compiler_trainer/step/captured.py",
    "compiler_trainer/sweep/point.py",
    "passes/memory/budget.py",
    PRIVATE_API,
}
OPERATORS = "torch.ops."  # operator namespaces may start with _


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports, including the imported attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted chains of names, `torch.x.y`, that a module spells out."""
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(names)])


def is_private_torch(name: str) -> bool:
    """Return True if a dotted name has a part of torch with a leading underscore, except dunders."""
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


SOLVERS = {"passes/memory/budget.py": {"numpy", "scipy"}}


def test_passes_import_torch_and_themselves_only():
    for path in PASSES:
        allowed = {"torch", "passes", *sys.stdlib_module_names} | SOLVERS.get(relative(path), set())
        assert {name.split(".")[0] for name in imported(tree_of(path))} <= allowed, path


def test_private_torch_is_used_in_one_file():
    for path in [*SOURCES, *sorted(ROOT.glob("tools/**/*.py"))]:
        names = {name for name in [*imported(tree_of(path)), *attributes(tree_of(path))] if is_private_torch(name)}
        assert bool(names) == (relative(path) == PRIVATE_API), (path, sorted(names))


TRANSFORMERS = "compiler_trainer/models/transformers_private.py"
INTERNALS = ("transformers.core_model_loading", "transformers.conversion_mapping", "_init_weights", "_keys_to_ignore")


def test_internals_of_transformers_are_used_in_one_file_only_and_its_versions_are_bounded():
    users = {relative(path) for path in SOURCES if any(name in path.read_text() for name in INTERNALS)}
    assert users == {TRANSFORMERS}
    assert "transformers>=5,<5.24" in (ROOT / "pyproject.toml").read_text() and "5.23" in (ROOT / TRANSFORMERS).read_text()


def arrow_up(importer: str, target: str) -> str:
    """Describe an import within a package that does not lead to a lower floor; return "" if it does."""
    package, *_ = importer.split(".")
    floor = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms}
    here, there = (name.split(".")[1] for name in (importer, target))
    if here == there or floor[there] < floor[here]:
        return ""
    return f"{importer} (floor {floor[here]}) imports {target} (floor {floor[there]})"


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(source) for source in SOURCES}


def arrows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (importer, target) of the imports within a package, except its own `__init__`."""
    importer = module_of(path)
    for name in imported(tree_of(path)):
        target = name if name in MODULES else name.rpartition(".")[0]
        if target in MODULES and all("." in module for module in (importer, target)):
            if importer.split(".")[0] == target.split(".")[0]:
                yield importer, target


def test_every_room_has_a_floor():
    for package, floors in FLOORS.items():
        rooms = {module_of(path).split(".")[1] for path in SOURCES if module_of(path).startswith(f"{package}.")}
        assert rooms == {room for rooms in floors for room in rooms}


def test_no_source_is_ignored_by_git():
    files = [relative(path) for room in ("compiler_trainer", "passes", "tools", "tests") for path in ROOT.glob(f"{room}/**/*.py")]
    ignored = subprocess.run(["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT, input="\n".join(files), text=True, capture_output=True)
    assert ignored.stdout == ""


def test_no_arrow_runs_up():
    assert not [wrong for path in SOURCES for arrow in arrows(path) if (wrong := arrow_up(*arrow))]


@pytest.mark.parametrize("package", FLOORS)
def test_arrows_between_rooms_turned_round_are_seen(package):
    down = {a for path in SOURCES for a in arrows(path) if a[0].startswith(f"{package}.")}
    between = {(a, b) for a, b in down if a.split(".")[1] != b.split(".")[1]}
    assert len(between) > 20 and all(arrow_up(b, a) for a, b in between)


RECORD = "passes/ir/record.py"


def test_one_file_reads_and_writes_what_nodes_carry():
    """All other files use the record of a node, or the functions for the keys of PyTorch's own tools."""
    for path in [*SOURCES, *sorted(ROOT.glob("tools/**/*.py")), *sorted(ROOT.glob("tests/**/*.py"))]:
        users = [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute) and node.attr == "meta"]
        assert bool(users) == (relative(path) in (RECORD, PRIVATE_API)), (path, users)


def test_imports_stand_at_the_top():
    for path in (path for path in SOURCES if relative(path) not in LATE_IMPORTS):
        imports = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [ast.unparse(node) for node in imports if node not in tree_of(path).body], path


def test_the_one_file_says_which_versions_it_was_checked_on():
    checked = (ROOT / PRIVATE_API).read_text()
    assert "torch>=2.11,<2.16" in (ROOT / "pyproject.toml").read_text()
    assert all(f"{version}." in checked for version in ("2.11", "2.12", "2.13", "2.14", "2.15"))
