"""What differs between two runs: each planted difference is told, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from commands import call
from tool_runs import run_folder

from compiler_trainer.inspect import diff
from compiler_trainer.inspect.dumps import Run, load

LAST = "19_step_overlap"


@pytest.fixture
def other(tmp_path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run_folder(), tmp_path / "other"))


def differing(a: Path, b: Path) -> dict[str, list[tuple[str, ...]]]:
    """The tables that are not empty, by title."""
    return {title: rows for title, _, rows in diff.sections(load(a), load(b)) if rows}


def rewrite(folder: Path, *changes: tuple[str, str]) -> None:
    path = folder / "graphs" / f"{LAST}.txt"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_a_run_does_not_differ_from_itself(monkeypatch, capsys):
    code = call("diff", str(run_folder()), str(run_folder()))
    assert code == 0 and capsys.readouterr().out == "no difference\n"


def test_names_and_lines_are_no_difference(other):
    rewrite(other, ("%embedding ", "%looked_up "), ("%embedding,", "%looked_up,"), ("%embedding)", "%looked_up)"), ("tool_runs.py:36", "tool_runs.py:99"))
    assert not differing(run_folder(), other)


def test_a_constant_changes_its_own_node_only(other):
    rewrite(other, ("2.220446049250313e-16", "1e-05"))
    found = differing(run_folder(), other)
    assert found.keys() == {"graph of step", "first changes of step"}
    assert found["graph of step"] == [("add.Scalar", "norm", "", "", "1")]


def test_an_operator_added_is_told_with_what_reads_it(other):
    path = other / "graphs" / f"{LAST}.txt"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("%tanh = "))
    name = lines[at].partition("(")[2].partition(")")[0]
    lines.insert(at, f"%relu = relu({name}) : f64[2, 4, 3]   # tool_runs.py:36 forward")
    lines[at + 1] = lines[at + 1].replace(name, "%relu")
    path.write_text("\n".join(lines) + "\n")
    assert sorted(differing(run_folder(), other)["graph of step"]) == [
        ("relu", "", "1", "", ""),
        ("tanh", "", "", "", "1"),
    ]


def test_another_mesh_differs_in_everything():
    found = differing(run_folder(), run_folder(tp=1))
    assert found["options"] == [("mesh.tp", "2", "1")]
    assert ("reduce_scatter over tp, calls", "1", "0", "-1") in found["communication of a step"]
    assert found["bytes at the peak of memory"][0][0] == "peak"
    assert "graph of step" in found


def test_options_and_losses(other):
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["optim"]["lr"], config["run"]["dir"] = 0.5, "elsewhere"
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    steps = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    steps[1]["loss"] += 0.25
    steps[2]["loss"] += 0.5
    (other / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    found = differing(run_folder(), other)
    assert found.keys() == {"options", "loss"} and [row[0] for row in found["options"]] == ["optim.lr"]
    assert [(row[0], row[3]) for row in found["loss"]] == [
        ("first difference, step 2", "0.25"),
        ("largest difference, step 3", "0.5"),
    ]


def test_options_are_as_a_command_line_takes_them(other):
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["optim"] |= {"max_norm": None, "betas": [0.5, 0.95], "stochastic_rounding": True, "new": "bfloat16"}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert sorted(differing(run_folder(), other)["options"]) == [
        ("optim.betas", "[0.9, 0.999]", "[0.5, 0.95]"),
        ("optim.new", "", "bfloat16"),
        ("optim.stochastic_rounding", "false", "true"),
    ]
    config["optim"]["max_norm"] = 1.0
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert ("optim.max_norm", "null", "1.0") in differing(run_folder(), other)["options"]


def test_a_folder_that_is_no_run_is_refused(monkeypatch, capsys, tmp_path):
    code = call("diff", str(run_folder()), str(tmp_path))
    assert code == 2 and capsys.readouterr().err.startswith("error: ")


def test_the_exit_code_says_that_something_differs(monkeypatch, capsys, other):
    rewrite(other, ("2.220446049250313e-16", "1e-05"))
    code = call("diff", str(run_folder()), str(other))
    assert code == 1 and "add.Scalar" in capsys.readouterr().out
    assert isinstance(load(other), Run)
