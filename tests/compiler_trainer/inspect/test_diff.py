"""The differences between two runs: each planted difference is shown, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import call
from dumped_stages import change
from tool_runs import run_folder
from torch import fx

from compiler_trainer.inspect import diff
from compiler_trainer.inspect.dumps import Run, load
from passes.ir import ir
from passes.ir.printer import Printed


@pytest.fixture
def other(tmp_path) -> Path:
    """Return a copy of the run, to be changed."""
    return Path(shutil.copytree(run_folder(), tmp_path / "other"))


def differing(a: Path, b: Path) -> dict[str, list[tuple[str, ...]]]:
    """Return the tables that are not empty, by title."""
    return {title: rows for title, _, rows in diff.sections(load(a), load(b)) if rows}


def rewrite(folder: Path, edit: Callable[[fx.Graph], None]) -> None:
    """Edit the last graph of a run."""
    change(load(folder).trained[-1], edit)


def other_epsilon(graph: fx.Graph) -> None:
    """Change one constant."""
    (node,) = (n for n in graph.nodes if 2.220446049250313e-16 in n.args)
    node.args = (node.args[0], 1e-05)


def test_a_run_does_not_differ_from_itself(monkeypatch, capsys):
    code = call("diff", str(run_folder()), str(run_folder()))
    assert code == 0 and capsys.readouterr().out == "no difference\n"


def test_names_and_lines_are_no_difference(other):
    def edit(graph: fx.Graph) -> None:
        for node in graph.nodes:
            ir.update(node, origin=replace(ir.record(node).origin, line="tool_runs.py:99"))
        next(node for node in graph.nodes if node.name == "embedding")._rename("looked_up")

    rewrite(other, edit)
    assert not differing(run_folder(), other)


def test_a_constant_changes_its_own_node_only(other):
    rewrite(other, other_epsilon)
    tables = differing(run_folder(), other)
    assert tables.keys() == {"graph of step", "first changes of step"}
    assert tables["graph of step"] == [("add.Scalar", "norm", "", "", "1")]


def test_an_operator_added_is_told_with_what_reads_it(other):
    def edit(graph: fx.Graph) -> None:
        tanh = next(node for node in graph.nodes if node.target == Printed("tanh"))
        with graph.inserting_before(tanh):
            relu = graph.call_function(Printed("relu"), tanh.args)
        ir.set_record(relu, ir.record(tanh))
        tanh.args = (relu,)

    rewrite(other, edit)
    assert sorted(differing(run_folder(), other)["graph of step"]) == [
        ("relu", "", "1", "", ""),
        ("tanh", "", "", "", "1"),
    ]


def test_another_mesh_differs_in_everything():
    tables = differing(run_folder(), run_folder(tp=1))
    assert tables["options"] == [("mesh.tp", "2", "1")]
    assert ("reduce_scatter over tp, calls", "1", "0", "-1") in tables["communication of a step"]
    assert tables["bytes at the peak of memory"][0][0] == "peak"
    assert "graph of step" in tables


def test_options_and_losses(other):
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["optim"]["lr"], config["run"]["dir"] = 0.5, "elsewhere"
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    steps = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    steps[1]["loss"] += 0.25
    steps[2]["loss"] += 0.5
    (other / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    tables = differing(run_folder(), other)
    assert tables.keys() == {"options", "loss"} and [row[0] for row in tables["options"]] == ["optim.lr"]
    assert [(row[0], row[3]) for row in tables["loss"]] == [
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
    rewrite(other, other_epsilon)
    code = call("diff", str(run_folder()), str(other))
    assert code == 1 and "add.Scalar" in capsys.readouterr().out
    assert isinstance(load(other), Run)
