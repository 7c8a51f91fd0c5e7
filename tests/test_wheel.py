"""The wheel installs the right packages and contains everything that the sources need."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Return the paths of the files in the wheel."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("compiler_trainer", "passes", "conf", "tools"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", sources / "out", sources]
    subprocess.run([sys.executable, *map(str, build)], check=True, capture_output=True)
    (wheel,) = (sources / "out").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_it_installs_the_trainer_and_the_passes_alone(names):
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"compiler_trainer", "passes"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_it_holds_every_source_choice_and_page(names):
    contents = {name for name in names if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for room in ("compiler_trainer", "passes") for path in (ROOT / room).rglob("*.*")}
    choices = {f"compiler_trainer/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.*")}
    assert contents == {name for name in sources | choices if "__pycache__" not in name and not name.endswith(".md")}


def test_every_package_that_is_imported_is_declared():
    requirements = [*DECLARED["dependencies"], *(requirement for extra in DECLARED["optional-dependencies"].values() for requirement in extra)]
    declared = {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in requirements}
    distributions = packages_distributions()
    for path in [*ROOT.glob("compiler_trainer/**/*.py"), *ROOT.glob("passes/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in (module.split(".")[0] for module in modules if module):
                is_ours = name in sys.stdlib_module_names or name in ("compiler_trainer", "passes")
                by = {distribution.lower() for distribution in distributions.get(name, [name])}
                assert is_ours or by & (declared | {"hydra-submitit-launcher", "submitit"}), f"{path}: {name} is not declared"


def test_pins_are_of_one_version_each():
    pinned = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(pinned) == len(set(pinned))
