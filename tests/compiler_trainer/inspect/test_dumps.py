"""Run folders are read back: every node of every stage; missing files are named."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dumped_stages import change
from printed_programs import joint, linear_program
from torch import nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.console import tabular
from compiler_trainer.inspect import dumps, glance, tables
from passes.check.runner import Dumper, PassRecord
from passes.cost.accounting import Accounting
from passes.cost.costs import Costs
from passes.ir import ir
from passes.ir.folds import Fold
from passes.ir.ir import Report
from passes.ir.printer import Printed, format_value, op_name, print_program
from passes.torch_private import LazyGraphModule

NOTHING = Accounting((), {}, 0, 0, 0, "x", "", {})


def read(program: ir.Program, folder: Path) -> dumps.Stage:
    """Return the stage read from the dump of a program."""
    Dumper(folder)(program, PassRecord("step", "joint", 0.0, 0, 0, Report(), NOTHING, {}, Costs((), (), ())))
    return dumps.load_stages(folder)[0]


def test_every_part_of_a_line_is_read(tmp_path):
    stage = read(linear_program()[1], tmp_path)
    weight, batch, gather, linear, total, done = stage.nodes
    assert (dict(stage.graph.mesh.sizes), str(stage.graph.stage)) == ({"dp_shard": 2}, "local")
    assert (weight.op, weight.label, weight.is_input) == ("parameter", "wq.weight", True)
    assert (linear.op, linear.operands, linear.value) == ("linear", ("x", "all_gather_default"), "f32[2, 8]")
    assert (linear.dtype, linear.shape, linear.bytes, linear.spec) == ("f32", (2, 8), 64, "[3@dp_shard, 8]")
    assert (linear.source, linear.module, linear.phase) == ("model.py:31", "layers.0.wq", "forward")
    assert (gather.source, gather.module, gather.phase, gather.line) == ("", "", "forward", 9)
    assert (total.spec, done.spec, done.phase) == ("[] sum(dp_shard)", "", "backward")
    assert [(output.kind, output.name) for output in stage.graph.outputs] == [("loss", "loss")]


def test_every_node_comes_back(tmp_path):
    program = joint({"dp_shard": 2, "tp": 2})
    stage, text = read(program, tmp_path), print_program(program)
    read_nodes = {node.name: node for node in stage.nodes}
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    assert read_nodes.keys() == {node.name for node in nodes} and stage.text == text == print_program(stage.graph)
    for node in nodes:
        read_node = read_nodes[node.name]
        assert list(dict.fromkeys(read_node.operands)) == [n.name for n in node.all_input_nodes]
        assert read_node.value == format_value(ir.value(node))
        assert read_node.is_input or read_node.op == op_name(node.target)
        assert text.splitlines()[read_node.line - 1] == read_node.text


def test_graphs_that_a_program_holds_have_paths(tmp_path):
    """The program counts, and an operator calls a graph."""
    small, program = linear_program()
    child = LazyGraphModule(nn.Module(), small.builder.graph)
    scalar = replace(program.inputs[1], kind="scalar", count=ir.Count(program, 2))
    two_inputs = replace(program, module=LazyGraphModule(nn.Module(), program.graph), inputs=(program.inputs[0], scalar))
    two_inputs.module.add_module("inner", child)
    nodes = read(two_inputs, tmp_path).nodes
    assert Counter(node.graph for node in nodes) == {"": 6, "x": 6, "inner": 6}


def test_what_has_no_form_is_read_as_it_prints(tmp_path):
    """Covers an unknown operator, a constant of an unknown type, and strings that look like operands."""
    small, program = linear_program()
    last = program.results()[0]
    last.target, last.args = Printed("local.mine"), (last.args[0], object(), '%c ) : #', float("-inf"), torch.float32)
    stage = read(program, tmp_path)
    assert stage.nodes[-1].text.startswith(f'%{last.name} = local.mine(%sum_dim_int_list, <object>, "%c ) : #", -inf, f32) : ')
    assert stage.nodes[-1].operands == ("sum_dim_int_list",)


def test_a_run_of_an_earlier_version_is_refused_by_what_reads_its_programs(tmp_path):
    stage = read(linear_program()[1], tmp_path)
    stage.dump.unlink()
    assert stage.casts is None and stage.report["program"] == "step" and stage.text
    with pytest.raises(UserError, match=r"00_step_joint.graph.json: is missing: an earlier version wrote the run"):
        _ = stage.nodes


@pytest.mark.parametrize("damage", [
    "", "{", "[]", "null", '{"programs": {}}', '{"tables": {}, "bodies": [], "programs": {"step": 1}}', "[" * 100_000,
])
def test_a_damaged_program_is_refused(tmp_path, damage):
    stage = read(linear_program()[1], tmp_path)
    stage.dump.write_text(damage)
    with pytest.raises(UserError, match="00_step_joint.graph.json: (is not in the format that a run writes|cannot be read)"):
        _ = stage.nodes


@pytest.mark.parametrize(("old", "new"), [
    ('"x"', "5"), ('"n":0', '"n":99'), ('"stage":', '"stage":1'), ('"modules":["",', '"modules":[5,'), ('"dims":', '"dim":'),
    ('"float32"', '"load"'), ('"line":"model.py:31"', '"line":[1]'),
])
def test_a_program_with_another_part_is_refused_or_read(tmp_path, old, new):
    stage = read(linear_program()[1], tmp_path)
    text = stage.dump.read_text()
    assert old in text
    stage.dump.write_text(text.replace(old, new))
    with suppress(UserError):
        _ = stage.casts, stage.nodes


def test_a_text_that_ends_too_early_is_refused(tmp_path):
    path = dump(tmp_path).path
    lines = path.read_text().splitlines(keepends=True)
    for count in (0, 1, len(lines) // 2, len(lines) - 1):
        path.write_text("".join(lines[:count]))
        with pytest.raises(UserError, match="00_step_joint.txt: is incomplete: nodes or their number are missing"):
            _ = dumps.load_stages(tmp_path)[0].text


def dump(folder: Path) -> dumps.Stage:
    return read(joint({"tp": 2}), folder)


def test_memory_of_layers_that_one_stands_for_is_so_many_times_its_value(tmp_path):
    stage = dump(tmp_path)
    node = next(node for node in stage.nodes if node.op == "parameter")
    size = {"f64": 8, "f32": 4}[node.dtype] * math.prod(node.shape)
    change(stage, folds=(Fold("layers", 3, 4),))
    rows = [[node.name, "output", times * size, "parameters"] for times in (1, 4)]
    stage.path.with_suffix(".costs.json").write_text(json.dumps({"collectives": [], "flops": [], "storages": rows}))
    (stage,) = dumps.load_stages(tmp_path)
    assert [glance.content_text(stored, node) for stored in glance.memory(stage)] == [node.value, f"4 x {node.value}"]


def test_where_nothing_is_sent_there_is_no_table_of_it(tmp_path, capsys):
    tables.show_traffic(dump(tmp_path), tabular())
    assert capsys.readouterr().out == ""


def test_stages_know_their_users(tmp_path):
    stage = dump(tmp_path)
    assert (stage.number, stage.program, stage.name, stage.title) == (0, "step", "joint", "00_step_joint")
    assert stage.report["report"] == {"counts": {}, "effects": [], "notes": [], "remarks": [], "reshards": []}
    for name, users in stage.users.items():
        assert all(name in user.operands for user in users)
    assert sum(map(len, stage.users.values())) == sum(len(set(n.operands)) for n in stage.nodes)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"config.yaml: is missing; check that this is the folder"),
        ({"config.yaml": "a: 1"}, r"report.json: is missing"),
        ({"config.yaml": "a: [", "report.json": "{}"}, r"config.yaml: is not valid YAML"),
        ({"config.yaml": "a: 1", "report.json": "[]"}, r"report.json: is not in the format that a run writes: \[\] is not a mapping"),
        ({"config.yaml": "a: 1", "report.json": "{"}, r"report.json: cannot be read"),
        ({"config.yaml": "a: 1", "report.json": "{}"}, r"graphs: holds no graphs; train with run.dump_graphs=true"),
    ],
)
def test_what_is_missing_is_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        dumps.load(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        dumps.load(tmp_path / "nothing")


def test_patterns():
    nodes = list(dumps.nodes_of(joint({"tp": 2})))
    def names(pattern):
        return {n.name for n in dumps.matching(nodes, lambda n: n.name, pattern)}
    assert names("relu") == {n for n in names("*") if "relu" in n} != set()
    assert names("t_*") == {n for n in names("*") if n.startswith("t_")} != set()
