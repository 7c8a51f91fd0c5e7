"""Run folders read back: every line of every stage, and what is missing named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from printed_programs import joint, linear_program

from compiler_trainer.config.errors import UserError
from compiler_trainer.console import tabular
from compiler_trainer.inspect import dumps, glance, tables
from passes.check.runner import Dumper, PassRecord
from passes.cost.accounting import Accounting
from passes.cost.costs import Costs
from passes.program import ir
from passes.program.ir import Report
from passes.program.printer import format_value, op_name, print_program

NOTHING = Accounting((), {}, 0, 0, 0, "x", "", {})


def test_a_line_is_taken_apart():
    parsed = dumps.parse(print_program(linear_program()[1]))
    assert (parsed.mesh, parsed.zigzag, parsed.stage) == ({"dp_shard": 2}, frozenset(), "local")
    weight, batch, gather, linear, total, done = parsed.nodes
    assert (weight.op, weight.label, weight.is_input) == ("parameter", "wq.weight", True)
    assert (linear.op, linear.operands, linear.value) == ("linear", ("x", "all_gather_default"), "f32[2, 8]")
    assert (linear.dtype, linear.shape, linear.spec) == ("f32", (2, 8), "[3@dp_shard, 8]")
    assert (linear.source, linear.module, linear.phase) == ("model.py:31", "layers.0.wq", "forward")
    assert (gather.source, gather.module, gather.phase, gather.line) == ("", "", "forward", 9)
    assert (total.spec, done.spec, done.phase) == ("[] sum(dp_shard)", "", "backward")
    assert [(o.kind, o.name, o.operand) for o in parsed.outputs] == [("loss", "loss", "psum_default")]


def test_every_node_comes_back():
    program = joint({"dp_shard": 2, "tp": 2})
    text = print_program(program)
    found = {node.name: node for node in dumps.parse(text).nodes}
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    assert found.keys() == {node.name for node in nodes}
    for node in nodes:
        read = found[node.name]
        assert list(dict.fromkeys(read.operands)) == [n.name for n in node.all_input_nodes]
        assert read.value == format_value(ir.value(node))
        assert read.is_input or read.op == op_name(node.target)
        assert text.splitlines()[read.line - 1] == read.text


def test_what_counts_labels_of_all_microbatches_is_told_apart():
    text = """# inputs: 2
%y = batch "y" : i64[4] [4]
%count_0 = scalar "count_0" : i64[] []
# count_0: the sum of 2 microbatches' results of
%y = placeholder(y) : i64[4]   # forward
%sum_1 = sum(%y) : i64[]   # forward
return [%sum_1]
# nodes: 1
%sum_1 = add(%count_0, %y) : i64[4]   # forward
"""
    nodes = dumps.parse(text).nodes
    dumps.check_order(nodes)
    assert [n.graph for n in nodes] == ["", "", "count_0", "count_0", ""]


def test_strings_may_hold_anything():
    (node,) = dumps.parse('# nodes: 1\n%a = f(%b, "%c ) : #", x=%d) : (f32[2], i64[])   # a.py:3 m.n backward\n').nodes
    assert (node.operands, node.value, node.shape, node.module) == (("b", "d"), "(f32[2], i64[])", (), "m.n")


def test_graphs_that_operators_call_are_told_apart():
    nodes = dumps.parse("# nodes: 1\n%a = f(%b) : f32[2]   # forward\n# graph: body\n%a = g(%b) : None   # forward\nreturn %a\n").nodes
    assert [(n.op, n.graph) for n in nodes] == [("f", ""), ("g", "body")]


def test_a_line_that_is_none_is_named():
    with pytest.raises(UserError, match="line 2: is not a node"):
        dumps.parse("# nodes: 1\nhello\n")


@pytest.mark.parametrize(("text", "says"), [
    ('# inputs: 1\n%a = parameter "w\n', "line 2: is not an input"),
    ('# outputs: 1\nloss "loss"\n', "line 2: is not an output"),
])
def test_half_a_line_is_named(text, says):
    with pytest.raises(UserError, match=says):
        dumps.parse(text)


def test_a_long_word_takes_no_longer_than_a_short_one():
    parsed = dumps.parse(f"# mesh: {'x' * 200_000} tp=2 all=tp*cp\n# nodes: 0\n")
    assert (parsed.mesh, parsed.flattened) == ({"tp": 2}, {"all": ["tp", "cp"]})


def test_a_text_that_ends_too_early_is_refused(tmp_path):
    path = dump(tmp_path).path
    lines = path.read_text().splitlines(keepends=True)
    for kept in (0, 1, len(lines) // 2, len(lines) - 1):
        path.write_text("".join(lines[:kept]))
        with pytest.raises(UserError, match="00_step_joint.txt: is not whole: it lacks nodes"):
            _ = dumps.load_stages(tmp_path)[0].nodes


def dump(folder: Path) -> dumps.Stage:
    Dumper(folder)(joint({"tp": 2}), PassRecord("step", "joint", 0.0, 0, 0, Report(), NOTHING, {}, Costs((), (), ())))
    return dumps.load_stages(folder)[0]


def test_memory_of_layers_that_one_stands_for_is_so_many_times_its_value(tmp_path):
    stage = dump(tmp_path)
    node = next(node for node in stage.nodes if node.op == "parameter")
    size = {"f64": 8, "f32": 4}[node.dtype] * math.prod(node.shape)
    stage.path.write_text(stage.text.replace("# inputs", "# folded: layers.3 stands for layers.3 to layers.7\n# inputs", 1))
    rows = [[node.name, "output", times * size, "parameters"] for times in (1, 4)]
    stage.path.with_suffix(".costs.json").write_text(json.dumps({"collectives": [], "flops": [], "storages": rows}))
    (stage,) = dumps.load_stages(tmp_path)
    assert [glance.held(stored, node) for stored in glance.memory(stage)] == [node.value, f"4 x {node.value}"]


def test_where_nothing_is_sent_there_is_no_table_of_it(tmp_path, capsys):
    tables.show_traffic(dump(tmp_path), tabular())
    assert capsys.readouterr().out == ""


def test_stages_know_their_users(tmp_path):
    stage = dump(tmp_path)
    assert (stage.number, stage.program, stage.name, stage.title) == (0, "step", "joint", "00_step_joint")
    assert stage.report["report"] == {"counts": {}, "notes": [], "remarks": [], "reshards": []}
    for name, users in stage.users.items():
        assert all(name in user.operands for user in users)
    assert sum(map(len, stage.users.values())) == sum(len(set(n.operands)) for n in stage.nodes)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"config.yaml: is missing; is this a run folder"),
        ({"config.yaml": "a: 1"}, r"report.json: is missing"),
        ({"config.yaml": "a: [", "report.json": "{}"}, r"config.yaml: is no YAML"),
        ({"config.yaml": "a: 1", "report.json": "[]"}, r"report.json: is not what a run writes: \[\] is not a mapping"),
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
    stage = dumps.parse(print_program(joint({"tp": 2})))
    def names(pattern):
        return {n.name for n in dumps.matching(stage.nodes, lambda n: n.name, pattern)}
    assert names("relu") == {n for n in names("*") if "relu" in n} != set()
    assert names("t_*") == {n for n in names("*") if n.startswith("t_")} != set()
