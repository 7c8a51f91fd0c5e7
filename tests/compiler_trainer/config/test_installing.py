"""Messages and pages say what to install from where; the project is on no package index."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from compiler_trainer.cli.extras import EXTRAS, not_installed
from compiler_trainer.config import extras

ROOT = Path(__file__).parents[3]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_sources_are_installed_from_their_folder():
    assert extras.install("hf") == f"pip install '{ROOT}[hf]'"
    assert str(not_installed(ModuleNotFoundError(name="plotly.offline"))) == f"plotly: is not installed, but needed here; pip install '{ROOT}[plots]'"


def test_a_wheel_is_installed_from_the_folder_that_pip_remembers(monkeypatch, tmp_path):
    clone = tmp_path / "a clone"
    record = json.dumps({"url": clone.as_uri(), "dir_info": {}})
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages/compiler_trainer/config/extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    assert extras.install("hf") == "pip install '.[hf]' in a clone of the repository"  # the folder is gone
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    assert shlex.split(extras.install("hf")) == ["pip", "install", f"{clone}[hf]"]


@pytest.mark.parametrize("url", ["https://example.org/repository.git", None])
def test_other_origins_are_answered_in_general(monkeypatch, tmp_path, url):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "compiler_trainer/config/extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: url and json.dumps({"url": url})))
    assert extras.install("hf").endswith("in a clone of the repository")

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", absent)
    assert extras.install("hf").endswith("in a clone of the repository")


def test_every_extra_that_a_message_names_is_declared():
    calls = [node for path in ROOT.glob("compiler_trainer/**/*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install"]
    named = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert len(calls) >= 2 and named | set(EXTRAS.values()) <= set(DECLARED)


def test_no_text_installs_the_project_from_an_index():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("passes/**/*.md")]
    sources = [path for room in ("compiler_trainer", "passes", "conf", "tools") for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".yaml", ".js", ".html")]
    wrong = [str(path) for path in (*pages, *sources) if re.search(r"(?:pip|uv|pipx) (?:install|add)[^\n]*[ '\"]compiler[-_]trainer", path.read_text())]
    assert len(sources) > 300 and wrong == []
