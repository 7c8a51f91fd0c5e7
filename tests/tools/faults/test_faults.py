"""The table of faults still fits the passes, and the tool tells who sees a fault."""

from __future__ import annotations

import ast

import pytest

from tools.faults import command, judge, plant
from tools.faults.models import make
from tools.faults.page import page
from tools.faults.plant import ROOT, mutated, planted
from tools.faults.table import FAULTS, Fault

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file_and_compiles(fault):
    text = mutated(fault)
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / fault.file).read_text()))


def test_faults_are_spread_over_the_rooms():
    assert len(FAULTS) >= 60 and len(BY_NAME) == len(FAULTS)
    rooms = {path.name for path in (ROOT / "passes").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms - {plant.room(fault) for fault in FAULTS} == {"check", "cost"}  # those who look, and who predict


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("axis_index)", 2)])
def test_a_fault_whose_text_is_not_there_once_is_named(old, count):
    with pytest.raises(ValueError, match=f"fault rotten: its old text occurs {count} times in passes/program/layout.py"):
        mutated(Fault("rotten", "passes/program/layout.py", old, "", ""))


def test_only_the_faulty_file_differs():
    fault = BY_NAME["loss_of_padding"]
    with planted(fault) as folder:
        differ = [path for path in (ROOT / "passes").rglob("*.py") if path.read_text() != (folder / path.relative_to(ROOT)).read_text()]
    assert [str(path.relative_to(ROOT)) for path in differ] == [fault.file]


def test_tests_that_import_what_is_at_fault_come_first():
    first, *others = plant.nearest_tests(ROOT, BY_NAME["shift_backwards"])
    assert first == "tests/passes/program/test_shift.py" and len(set(others)) == len(others) > 150


@pytest.mark.full
def test_faults_are_judged_resumed_and_listed(tmp_path, capsys):
    results, wanted = tmp_path / "faults.jsonl", tmp_path / "faults.md"
    arguments = ["--only", "buffers_not_*", "--models", "state", "--results", str(results), "--write", str(wanted)]
    assert command.main(arguments) == 0
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert said == {"buffers_not_stored": "spec, numeric, value", "buffers_not_accumulated": "no model comes by"}
    before = results.read_text()
    assert command.main(arguments) == 0 and results.read_text() == before
    assert "2 were planted: spec sees 1, numeric 1, values differ of 1" in wanted.read_text()


def test_it_stops_where_the_tree_itself_is_at_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "reached", lambda models: {})
    monkeypatch.setattr(command.Judge, "__call__", lambda *_: {"spec": "", "numeric": "", "value": "state: loss differs"})
    assert command.main(["--results", str(tmp_path / "faults.jsonl")]) == 1
    assert "wrong without any fault" in capsys.readouterr().err


def test_a_pattern_that_names_no_fault_is_bad_input(tmp_path, capsys):
    assert command.main(["--only", "nothing", "--results", str(tmp_path / "faults.jsonl")]) == 2
    assert "no fault is named like 'nothing'" in capsys.readouterr().err


def test_the_page_puts_first_what_survives():
    faults = FAULTS[:3]
    seen = {"models": "odd", "spec": "odd: said", "numeric": "odd: said", "value": "odd: loss differs"}
    unseen = dict.fromkeys(seen, "") | {"models": "odd"}
    known = {faults[0].name: seen, faults[1].name: unseen | {"suite": "a.py::test_b"}, faults[2].name: unseen | {"suite": "survives"}}
    rows = [line.split(" | ")[0] for line in page(faults, known).splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {faults[k].name}" for k in (2, 1, 0)]


@pytest.mark.parametrize("name", ["state", "images"])
def test_the_tree_as_it_is_trains_the_models_right(name):
    case = make(name)
    step, said = judge.compiled(case, "none")
    assert step is not None and not judge.by_value(case, step), said
