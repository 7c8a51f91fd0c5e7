"""Recomputation: the same bits from fewer kept values."""

from __future__ import annotations

import operator

import pytest
import torch
from joint_programs import Tiny, body, count, equal, joint, plain, run

from passes import boundary, ir
from passes.printer import print_program
from passes.regions import layer_paths, region_of, regions
from passes.remat import COMMUNICATION, Remat, is_random, saved_nodes
from passes.spec import Spec

aten = torch.ops.aten
FSDP = (("dp_shard", 2),)
MESHES = [(), FSDP, (("dp_shard", 2), ("tp", 2))]
WHOLE = Spec.whole((4, 4))


# ---- regions ---------------------------------------------------------------------------------------

PATHS = ["", "norm", "layers.0.wq", "layers.1.wq", "layers.1.experts.0", "layers.1.experts.1", "head.0"]


@pytest.mark.parametrize(
    ("path", "region"),
    [
        ("", ""),
        ("head.0", ""),  # a number without siblings
        ("layers", ""),
        ("layers.0.wq", "layers.0"),
        ("layers.1.experts.0", "layers.1"),  # the outermost counts
        ("layers.2.wq", ""),
    ],
)
def test_a_layer_is_a_numbered_child_with_siblings(path, region):
    assert region_of(path, layer_paths(PATHS)) == region


def test_a_weight_without_a_module_belongs_where_it_is_used():
    tiny = Tiny()
    w, x = tiny.input("w", WHOLE), tiny.input("x", WHOLE, "batch")
    cast = tiny.call(aten._to_copy.default, w, dtype=torch.float64)
    y = tiny.call(aten.mm.default, x, x, module="layers.0")
    z = tiny.call(aten.mm.default, cast, cast, module="layers.1")
    found = regions(tiny.program(y, z))
    assert {node.name: region for node, region in found.items()} == {
        "_to_copy": "layers.1", "mm": "layers.0", "mm_1": "layers.1"}


def test_backward_nodes_lie_in_the_layer_they_differentiate():
    program, _ = joint(FSDP)
    found = regions(program)
    scatters = [found[n] for n in program.calls() if n.target is boundary.reduce_scatter]
    assert sorted(scatters) == [""] * 3 + ["blocks.0"] * 4 + ["blocks.1"] * 4


# ---- small graphs ----------------------------------------------------------------------------------


def two_layers(activation=aten.silu.default) -> tuple[ir.Program, ir.Context]:
    """Two layers of an activation and a sharded weight, and their backward."""
    tiny = Tiny(dp_shard=2)
    x, *weights = tiny.input("x", WHOLE, "batch"), *(tiny.input(f"w{i}", WHOLE) for i in range(2))
    kept = []
    for i, w in enumerate(weights):
        full = tiny.call(boundary.all_gather, w, 0, "dp_shard", 2, 8, torch.float32, None, module=f"layers.{i}")
        y = tiny.call(activation, x, module=f"layers.{i}")
        kept.append((y, full))
        x = tiny.call(aten.matmul.default, y, tiny.call(aten.slice.Tensor, full, 0, 0, 4, module=f"layers.{i}"),
                      module=f"layers.{i}")
    gradient = tiny.call(aten.ones_like.default, tiny.call(aten.neg.default, x), phase="backward")
    for y, full in reversed(kept):
        gradient = tiny.call(aten.mul.Tensor, gradient, y, phase="backward")
        total = tiny.call(aten.sum.default, full, phase="backward")
        gradient = tiny.call(aten.add.Tensor, gradient, total, phase="backward")
    return tiny.program(gradient), tiny.ctx


FORWARD = """\
%all_gather = all_gather(%w0, 0, "dp_shard", 2, 8, f32, None)
%silu = silu(%x)
%slice_1 = slice.Tensor(%all_gather, 0, 0, 4)
%matmul = matmul(%silu, %slice_1)
%all_gather_1 = all_gather(%w1, 0, "dp_shard", 2, 8, f32, None)
%silu_1 = silu(%matmul)
%slice_2 = slice.Tensor(%all_gather_1, 0, 0, 4)
%matmul_1 = matmul(%silu_1, %slice_2)
%neg = neg(%matmul_1)
%ones_like = ones_like(%neg)
"""


def test_a_layer_is_recomputed_right_before_its_backward():
    program, ctx = two_layers()
    result, report = Remat("full")(program, ctx)
    assert body(result) == FORWARD + """\
%silu_2 = silu(%matmul)
%mul = mul.Tensor(%ones_like, %silu_2)
%all_gather_2 = all_gather(%w1, 0, "dp_shard", 2, 8, f32, None)
%sum_1 = sum(%all_gather_2)
%add = add.Tensor(%mul, %sum_1)
%silu_3 = silu(%x)
%mul_1 = mul.Tensor(%add, %silu_3)
%all_gather_3 = all_gather(%w0, 0, "dp_shard", 2, 8, f32, None)
%sum_2 = sum(%all_gather_3)
%add_1 = add.Tensor(%mul_1, %sum_2)"""
    square, gathered = 4 * 4 * 4, 4 * 8 * 4  # bytes; neg is read by ones_like, matmul enters a layer
    assert report.counts == {"recomputed": 4, "regathered": 2, "saved_bytes_before": 3 * square + 2 * gathered,
                             "saved_bytes_after": 2 * square}


def test_gathered_weights_are_kept_without_regather():
    program, ctx = two_layers()
    result, report = Remat("none", regather=False)(program, ctx)
    assert body(result) == body(program)
    assert report.counts["recomputed"] == 0


def test_random_values_are_kept():
    program, ctx = two_layers(aten.rand_like.default)
    result, report = Remat("full")(program, ctx)
    assert count(result, aten.rand_like.default, "backward") == 0
    assert "kept of what is recomputed, random: 2" in report.notes


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_attention_is_random_only_with_dropout(dropout_p):
    tiny = Tiny()
    q = tiny.input("q", Spec.whole((1, 1, 4, 8)))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert is_random(tiny.call(flash, q, q, q, dropout_p)) == (dropout_p > 0)


def test_values_written_in_place_are_kept_with_their_readers():
    tiny = Tiny()
    x = tiny.input("x", WHOLE, "batch")
    for i in range(2):
        y = tiny.call(aten.mul.Tensor, x, 2.0, module=f"layers.{i}")
        x = tiny.call(aten.exp.default, tiny.call(aten.add_.Scalar, y, 1.0, module=f"layers.{i}"), module=f"layers.{i}")
        x = tiny.call(aten.silu.default, tiny.call(aten.cos.default, x, module=f"layers.{i}"), module=f"layers.{i}")
    gradient = tiny.call(aten.ones_like.default, tiny.call(aten.neg.default, x), phase="backward")
    for node in [n for n in tiny.graph.nodes if n.target in (aten.exp.default, aten.cos.default)]:
        gradient = tiny.call(aten.mul.Tensor, gradient, node, phase="backward")
    result, _ = Remat("full")(tiny.program(gradient), tiny.ctx)
    backward = {n.target for n in result.calls() if ir.phase(n) == "backward"}
    assert backward == {aten.ones_like.default, aten.mul.Tensor, aten.cos.default}


def test_a_model_without_layers_is_refused():
    tiny = Tiny()
    program = tiny.program(tiny.call(aten.silu.default, tiny.input("x", WHOLE), module="net.0"))
    with pytest.raises(ir.CompileError, match="the model has none; set passes.remat.policy=none"):
        Remat("full")(program, tiny.ctx)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ir.CompileError, match="'some' is not one of none, full"):
        Remat("some")(*two_layers())  # type: ignore[arg-type]


def test_regather_of_nothing_is_reported():
    _, report = Remat()(*joint())
    assert report.counts["regathered"] == 0 and "0 gathers are repeated" in report.notes[0]


# ---- a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_recomputed_values_are_the_same_bits_and_the_input_is_left_alone(mesh):
    program, ctx = joint(mesh)
    text = print_program(program)
    for rewrite in (Remat("none"), Remat("full"), Remat("full", regather=False)):
        result, _ = rewrite(program, ctx)
        result.graph.lint()
        assert equal(run(result, ctx), plain(mesh))
    assert print_program(program) == text


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_of_a_layer_only_its_output_and_communication_are_kept(mesh):
    program, _ = Remat("full")(*joint(mesh))
    written = [n.args[0] for n in program.calls() if n.target is aten.add_.Scalar]
    for node in saved_nodes(program):
        block = ir.module_path(node).split(".")[:2]
        leaves = any(ir.module_path(user).split(".")[:2] != block for user in node.users if ir.phase(user) == "forward")
        in_place = any(operand in written or operand.target is aten.add_.Scalar for operand in node.all_input_nodes)
        assert block[0] != "blocks" or leaves or in_place or node.target in COMMUNICATION, node


def test_a_layer_keeps_less_than_a_third():
    def bytes_of_two_layers(policy):
        two, four = (Remat(policy)(*joint(FSDP, n))[1].counts["saved_bytes_after"] for n in (2, 4))
        return four - two

    assert 0 < 3 * bytes_of_two_layers("full") < bytes_of_two_layers("none")


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("regather", [True, False])
def test_each_parameter_is_gathered_once_a_phase(policy, regather):
    program, report = Remat(policy, regather)(*joint(FSDP))
    for node, given in zip(program.placeholders(), program.inputs, strict=True):
        if given.kind == "parameter":
            phases = [ir.phase(user) for user in node.users if user.target is boundary.all_gather]
            again = regather and given.name != "embed.weight"  # the gradient of a look-up does not read the table
            assert phases == ["forward"] + ["backward"] * again
    assert report.counts["regathered"] == 10 * regather


def test_layers_are_recomputed_one_after_the_other():
    program, _ = Remat("full")(*joint(FSDP, 4))
    paths = [ir.module_path(n) for n in program.calls() if ir.phase(n) == "backward"]
    blocks = [int(path.split(".")[1]) for path in paths if path.startswith("blocks.")]
    assert blocks == sorted(blocks, reverse=True) and set(blocks) == {0, 1, 2, 3}


def test_parts_of_a_tuple_are_never_cloned_without_it():
    program, _ = Remat("full")(*joint(FSDP))
    for node in program.calls():
        if node.target is operator.getitem:
            assert ir.phase(node) == ir.phase(node.args[0])
