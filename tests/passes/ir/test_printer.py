"""The text of a program: complete, one line for each node, and equal for equal programs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from printed_programs import joint, linear_program
from small_programs import Small, cut
from torch import fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.order import ZIGZAG
from passes.ir.printer import format_constant, format_dtype, format_node, format_operand, op_name, print_program
from passes.ops import reshard
from passes.torch_private import c10d

aten = torch.ops.aten
F32 = torch.float32


def test_a_program_as_text():
    assert print_program(linear_program()[1]) == """\
# mesh: dp_shard=2
# stage: local
# inputs: 2
%wq_weight = parameter "wq.weight" : f32[4, 4] [8@dp_shard, 4]
%x = batch "x" : f32[2, 4] [3@dp_shard, 4]
# outputs: 1
loss "loss" = %psum_default : f32[] []
# nodes: 4
%all_gather_default = all_gather(%wq_weight, 0, "dp_shard", 2, 8, f32, None) : f32[8, 4]   # forward
%linear_default = linear(%x, %all_gather_default) : f32[2, 8] [3@dp_shard, 8]   # model.py:31 layers.0.wq forward
%sum_dim_int_list = sum.dim_IntList(%linear_default, [0, 1], dtype=f32) : f32[] [] sum(dp_shard)   # forward
%psum_default = psum(%sum_dim_int_list, "dp_shard", f32, None) : f32[]   # backward
"""


def test_the_same_program_has_the_same_text():
    program = joint({"dp_shard": 2, "tp": 2})
    text = print_program(program)
    assert print_program(joint({"dp_shard": 2, "tp": 2})) == text
    assert print_program(program.copy().copy()) == text
    assert print_program(joint({"dp_shard": 2})) != text


def test_every_node_has_one_line_and_nothing_of_this_machine_is_in_it():
    program = joint({"dp_shard": 2, "tp": 2})
    text = print_program(program)
    for node in program.graph.nodes:
        if node.op != "output":
            assert len(re.findall(rf"^%{node.name} = ", text, re.M)) == 1
    assert not re.findall(r"0x[0-9a-f]{6,}|/|object at", text)
    assert len(re.findall(r"  # printed_programs.py:\d+ layers.\d forward$", text, re.M)) >= 6


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.linear.default, "linear"),
        (aten.add.Tensor, "add.Tensor"),
        (reshard.psum, "psum"),
        (c10d.wait_tensor.default, "wait_tensor"),
        (torch.ops.prims.iota.default, "prims.iota"),
        (torch.ops.higher_order.flex_attention, "flex_attention"),
    ],
)
def test_operator_names(target, name):
    assert op_name(target) == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "f8_e4m3fn"), (torch.int64, "i64"), (torch.uint8, "u8"),
     (torch.bool, "bool"), (torch.complex64, "c64")],
)
def test_dtype_names(dtype, name):
    assert format_dtype(dtype) == name


@pytest.mark.parametrize(
    ("constant", "text"),
    [
        (1e-05, "1e-05"), (True, "True"), (None, "None"), ("tp", '"tp"'), ("a\nb", '"a\\nb"'),
        (torch.strided, "strided"),
        (torch.device("cpu"), "cpu"), (torch.device("cuda", 3), "cuda"), (torch.contiguous_format, "contiguous_format"), (object(), "<object>"),
    ],
)
def test_constants(constant, text):
    assert format_constant(constant) == text


def test_long_constants_are_cut_but_told_apart():
    a, b = list(range(100)), [*range(50), -1, *range(51, 100)]
    assert re.fullmatch(r"\[0, 1, 2, 3, 4, 5, 6, 7, \.\.\. 100 in all #[0-9a-f]{8}\]", format_operand(a))
    assert format_operand(a) != format_operand(b)
    assert format_operand({"b": [1, slice(0, None)], "a": 2.0}) == "{a: 2.0, b: [1, slice(0, None, None)]}"
    assert len(format_constant("x" * 5000)) < 100 and format_constant("x" * 5000) != format_constant("x" * 5001)


def test_operands_are_never_cut():
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(20)]
    cat = graph.call_function(aten.cat.default, (nodes,))
    assert all(f"%x{i}" in format_node(cat) for i in range(20))


def test_graphs_that_operators_call_are_printed_too():
    small = Small()
    x = small.input("x", cut((2,)), "batch")
    inner = fx.symbolic_trace(lambda a: a + 1)
    for node in inner.graph.nodes:
        ir.update(node, phase="forward")
    program = small.program([("loss", "loss", x, cut((2,)))])
    program.module.add_module("body", inner)
    body = print_program(program).partition("# graph: body\n")[2]
    assert body == """\
%a = placeholder(a) : None   # forward
%add = add(%a, 1) : None   # forward
return %add
"""


def test_the_order_of_a_sequence_is_said():
    _, program = linear_program()
    first, *others = program.inputs
    inputs = (replace(first, spec=first.spec.ordered(ZIGZAG)), *others)
    zigzag = replace(program, mesh=Mesh.of({"dp_shard": 2, "cp": 2}), inputs=inputs)
    assert print_program(zigzag).startswith("# mesh: dp_shard=2 cp=2 (head and tail) ")
