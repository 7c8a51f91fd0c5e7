"""The table of faults still fits the passes, and the tool reports which checks notice a fault."""

from __future__ import annotations

import ast

import pytest

from tools.faults import command, judge, plant
from tools.faults.fault import Fault
from tools.faults.models import make
from tools.faults.mutations import mutations, mutations_of
from tools.faults.page import page
from tools.faults.plant import ROOT, mutated, planted
from tools.faults.table import FAULTS

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize("fault", [*FAULTS, *mutations(2)], ids=lambda fault: fault.name)
def test_a_fault_fits_its_file_and_compiles(fault):
    text = mutated(fault)
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / fault.file).read_text()))


def test_faults_are_spread_over_the_rooms():
    assert len(FAULTS) >= 60 and len(BY_NAME) == len(FAULTS)
    rooms = {path.name for path in (ROOT / "passes").iterdir() if path.is_dir() and path.name != "__pycache__"}
    for faults in (FAULTS, mutations(2)):
        assert rooms - {fault.room for fault in faults} == {"check", "cost"}  # they verify and predict


SOURCE = """
def f(a, b):
    if not a and b == 2:
        return f"{a < b}"
    return a.g(b + 1, True) if b in a else "x" + a


class C:
    def f(self):
        return lambda n: n // 2
"""


def test_every_operator_and_constant_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.faults.mutations.ROOT", tmp_path)
    (tmp_path / "passes/room").mkdir(parents=True)
    path = tmp_path / "passes/room/file.py"
    path.write_text(SOURCE)
    faults = {fault.name.removeprefix("room/file:"): (fault.old, fault.new) for fault in mutations_of(path)}
    assert faults == {
        "f/boolean_1": ("not a and b == 2", "(not a) or (b == 2)"),
        "f/negation_1": ("not a", "(a)"),
        "f/compare_1": ("b == 2", "(b) != (2)"),
        "f/number_1": ("2", "3"),
        "f/branch_1": ('a.g(b + 1, True) if b in a else "x" + a', '"x" + a if b in a else a.g(b + 1, True)'),
        "f/arithmetic_1": ("b + 1", "(b) - (1)"),
        "f/number_2": ("1", "2"),
        "f/flag_1": ("True", "False"),
        "f/compare_2": ("b in a", "(b) not in (a)"),
        "C.f/arithmetic_1": ("n // 2", "(n) * (2)"),
        "C.f/number_1": ("2", "3"),
    }
    for fault in mutations_of(path):
        ast.parse(fault.planted_in(SOURCE))


def test_a_fault_by_syntax_is_of_the_tree_as_it_is():
    fault = Fault("moved", "passes/ir/layout.py", "old", "new", "", at=3)
    assert fault.planted_in("1, old, old") == "1, new, old"
    with pytest.raises(ValueError, match="fault moved: its old text occurs not at its offset"):
        fault.planted_in("the old text")


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("axis_index)", 2)])
def test_a_fault_whose_text_is_not_there_once_is_named(old, count):
    with pytest.raises(ValueError, match=f"fault rotten: its old text occurs {count} times in passes/ir/layout.py"):
        mutated(Fault("rotten", "passes/ir/layout.py", old, "", ""))


def test_only_the_faulty_file_differs():
    fault = BY_NAME["loss_of_padding"]
    with planted(fault) as folder:
        differ = [path for path in (ROOT / "passes").rglob("*.py") if path.read_text() != (folder / path.relative_to(ROOT)).read_text()]
    assert [str(path.relative_to(ROOT)) for path in differ] == [fault.file]


def test_tests_that_import_what_is_at_fault_come_first():
    first, *others = plant.nearest_tests(ROOT, BY_NAME["shift_backwards"])
    assert first == "tests/passes/ops/test_shift.py" and len(set(others)) == len(others) > 150


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


@pytest.mark.full
def test_it_stops_where_the_tree_itself_is_at_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "reached", lambda faults, models: {})
    monkeypatch.setattr(command.Judge, "__call__", lambda *_: {"spec": "", "numeric": "", "value": "state: loss differs"})
    assert command.main(["--results", str(tmp_path / "faults.jsonl")]) == 1
    assert "wrong without any fault" in capsys.readouterr().err


def test_a_pattern_that_names_no_fault_is_bad_input(tmp_path, capsys):
    assert command.main(["--only", "nothing", "--results", str(tmp_path / "faults.jsonl")]) == 2
    assert "no fault matches 'nothing'" in capsys.readouterr().err


def test_the_page_puts_first_what_survives():
    faults = FAULTS[:3]
    seen = {"models": "odd", "spec": "odd: said", "numeric": "odd: said", "value": "odd: loss differs"}
    unseen = dict.fromkeys(seen, "") | {"models": "odd"}
    known = {faults[0].name: seen, faults[1].name: unseen | {"suite": "a.py::test_b"}, faults[2].name: unseen | {"suite": "survives"}}
    text = page(faults, known)
    rows = [line.split(" | ")[0] for line in text.partition("| fault |")[2].splitlines() if line.startswith("| ")]
    assert rows == [f"| {faults[k].name}" for k in (2, 1, 0)]
    assert "| ops | 3 | 1 | 0 | 0 | 2 | 0 |" in text and "| said | 1 |" in text


@pytest.mark.parametrize("name", ["state", "images"])
def test_the_tree_as_it_is_trains_the_models_right(name):
    case = make(name)
    step, said = judge.compiled(case, "none")
    assert step is not None and not judge.by_value(case, step), said
