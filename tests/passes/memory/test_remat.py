"""Recomputation: the same bits from fewer kept values."""

from __future__ import annotations

import functools
import operator
import re

import pytest
import torch
from joint_programs import Tiny, body, count, equal, joint, plain, run
from oracle import LRS, NO_DECAY, trained_alike

from passes.cost.accounting import Ledger, count_flops, peak_of
from passes.ir import ir
from passes.ir.machine import Balance
from passes.ir.operators import is_random, kind_of, name_of
from passes.ir.printer import print_program
from passes.ir.spec import Spec
from passes.memory.budget import pose
from passes.memory.recompute import saved_nodes
from passes.memory.remat import Remat, operator_name
from passes.ops import reshard
from passes.ops.attend import attend
from passes.ops.host import offload, reload, there
from passes.trace.abstract_eval import abstract_eval

aten = torch.ops.aten
FSDP = (("dp_shard", 2),)
MESHES = [(), FSDP, (("dp_shard", 2), ("tp", 2))]
WHOLE = Spec.whole((4, 4))


def test_backward_nodes_lie_in_the_layer_they_differentiate():
    program, _ = joint(FSDP)
    scatters = [str(ir.layer(n) or "") for n in program.calls() if n.target is reshard.reduce_scatter]
    assert sorted(scatters) == [""] * 3 + ["blocks.0"] * 4 + ["blocks.1"] * 4


# ---- small graphs ----------------------------------------------------------------------------------


def two_layers(activation=aten.silu.default, device: str = "cpu") -> tuple[ir.Program, ir.Context]:
    """Build two layers of an activation and a sharded weight, with their backward."""
    tiny = Tiny(device, dp_shard=2)
    x, *weights = tiny.input("x", WHOLE, "batch"), *(tiny.input(f"w{i}", WHOLE) for i in range(2))
    saved = []
    for i, w in enumerate(weights):
        full = tiny.call(reshard.all_gather, w, 0, "dp_shard", 2, 8, torch.float32, None, module=f"layers.{i}")
        y = tiny.call(activation, x, module=f"layers.{i}")
        saved.append((y, full))
        x = tiny.call(aten.matmul.default, y, tiny.call(aten.slice.Tensor, full, 0, 0, 4, module=f"layers.{i}"),
                      module=f"layers.{i}")
    gradient = tiny.call(aten.ones_like.default, tiny.call(aten.neg.default, x), phase="backward")
    for i, (y, full) in reversed(list(enumerate(saved))):
        backward = {"phase": "backward", "module": f"layers.{i}"}
        product = tiny.call(aten.mul.Tensor, gradient, y, **backward)
        gradient = tiny.call(aten.add.Tensor, product, tiny.call(aten.sum.default, full, **backward), **backward)
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
                             "saved_bytes_after": 2 * square, "offloaded_bytes": 0}


def test_gathered_weights_are_kept_without_regather():
    program, ctx = two_layers()
    result, report = Remat("none", regather=False)(program, ctx)
    assert body(result) == body(program)
    assert report.counts["recomputed"] == 0


def test_random_values_are_kept():
    program, ctx = two_layers(aten.rand_like.default)
    result, report = Remat("full")(program, ctx)
    assert count(result, aten.rand_like.default, "backward") == 0
    assert "kept instead of recomputed, random: 2" in report.notes


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_attention_is_random_only_with_dropout(dropout_p):
    tiny = Tiny()
    q = tiny.input("q", Spec.whole((1, 1, 4, 8)))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert is_random(tiny.call(flash, q, q, q, dropout_p)) == (dropout_p > 0)


@pytest.mark.parametrize("policy, repeated", [("selective", 0), ("full", 2)])
def test_selective_keeps_attention_by_interval(policy, repeated):
    tiny = Tiny()
    x, bounds = tiny.input("x", Spec.whole((1, 1, 4, 8)), "batch"), tiny.input("bounds", Spec.whole((1, 4)), "batch")
    read = []
    for i in range(2):
        x = tiny.call(aten.silu.default, x, module=f"layers.{i}")
        pair = tiny.call(attend, x, x, x, bounds, bounds, None, [], 1.0, "", module=f"layers.{i}")
        read.append(x := tiny.call(operator.getitem, pair, 0, module=f"layers.{i}"))
        x = tiny.call(aten.cos.default, x, module=f"layers.{i}")
    gradient = tiny.call(aten.ones_like.default, tiny.call(aten.neg.default, x), phase="backward")
    for node in reversed(read):
        gradient = tiny.call(aten.mul.Tensor, gradient, node, phase="backward")
    result, _ = Remat(policy)(tiny.program(gradient), tiny.ctx)
    assert count(result, attend, "backward") == repeated


def test_a_model_without_layers_is_refused():
    tiny = Tiny()
    program = tiny.program(tiny.call(aten.silu.default, tiny.input("x", WHOLE), module="net"))
    with pytest.raises(ir.CompileError, match="the model has none; set passes.remat.policy=none"):
        Remat("full")(program, tiny.ctx)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ir.CompileError, match="'some' is not one of none, full"):
        Remat("some")(*two_layers())  # type: ignore[arg-type]


# ---- a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_recomputed_values_are_the_same_bits_and_the_input_is_left_alone(mesh):
    program, ctx = joint(mesh)
    text = print_program(program)
    again = {"ops": {"all_gather": "recompute"}} if mesh else {}
    policies = [Remat("none"), Remat("full"), Remat("full", regather=False), Remat("selective"), Remat("every_n"),
                Remat("selective", save=()), Remat("none", modules={"blocks.1": "recompute"}), Remat("attention"),
                Remat("selective", layers={"blocks.0": "full"}), Remat("full", layers={"blocks.1": "none"}),
                Remat("full", ops={"*attention*": "save"}), Remat("full", **again), Remat("budget", budget_bytes=12_000),
                Remat("offload"), Remat("full", modules={"blocks.0": "offload"}), Remat("none", ops={"*attention*": "offload"})]
    for rewrite in policies:
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
        assert block[0] != "blocks" or leaves or in_place or kind_of(node), node


def test_a_layer_keeps_less_than_a_third():
    def bytes_of_two_layers(policy):
        two, four = (Remat(policy)(*joint(FSDP, n))[1].counts["saved_bytes_after"] for n in (2, 4))
        return four - two

    assert 0 < 3 * bytes_of_two_layers("full") < bytes_of_two_layers("none")


def kept_ops(remat: Remat, mesh=(), n_blocks: int = 2) -> dict[str, set[str]]:
    """Return the operators whose results each block keeps for the backward."""
    program, _ = remat(*joint(mesh, n_blocks))
    result: dict[str, set[str]] = {}
    for node in saved_nodes(program):
        block = ".".join(ir.module_path(node).split(".")[:2])
        result.setdefault(block, set()).add(operator_name(node))
    return result


def test_selective_keeps_also_products_and_attention():
    full, selective = (kept_ops(Remat(policy))["blocks.1"] for policy in ("full", "selective"))
    assert not any("attention" in name for name in full)
    added = selective - full
    assert any("attention" in name for name in added) and added & {"mm", "linear", "addmm", "bmm", "matmul"}
    assert "gelu" not in selective


def test_attention_keeps_its_results_alone():
    full, attention = (kept_ops(Remat(policy))["blocks.1"] for policy in ("full", "attention"))
    assert attention - full and all("attention" in name for name in attention - full)


def test_some_layers_may_have_another_policy():
    mixed = kept_ops(Remat("selective", layers={"blocks.0": "full", "blocks.[01]": "none"}), n_blocks=3)
    for block, policy in (("blocks.0", "full"), ("blocks.1", "none"), ("blocks.2", "selective")):
        assert mixed[block] == kept_ops(Remat(policy), n_blocks=3)[block]
    mixed = kept_ops(Remat("none", layers={"blocks.1": "attention"}))
    assert mixed["blocks.1"] == kept_ops(Remat("attention"))["blocks.1"]


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ir.Refused, match=r"layers: no layer is named like 'blocks.2'; they are named from blocks.0 to blocks.1"):
        Remat("full", layers={"blocks.2": "none"})(*joint())


def test_what_selective_keeps_is_a_table():
    assert "gelu" in kept_ops(Remat("selective", save=("gelu",)))["blocks.1"]


def test_every_n_recomputes_every_nth_layer():
    every_3, none, full = (kept_ops(r, n_blocks=4) for r in (Remat("every_n", every_n=3), Remat("none"), Remat("full")))
    assert [every_3[f"blocks.{i}"] == full[f"blocks.{i}"] for i in range(4)] == [True, False, False, True]
    assert every_3["blocks.1"] == none["blocks.1"]


def test_a_module_pattern_prevails_over_an_operator_pattern_and_both_over_the_policy():
    requested = Remat("full", modules={"blocks.1": "save"}, ops={"gelu": "save"})
    saved = kept_ops(requested)
    assert "gelu" in saved["blocks.0"] and not any("attention" in name for name in saved["blocks.0"])
    assert saved["blocks.1"] == kept_ops(Remat("none"))["blocks.1"]
    requested = Remat("none", modules={"blocks.0": "recompute"})
    assert kept_ops(requested)["blocks.0"] == kept_ops(Remat("full"))["blocks.0"]


def test_communication_is_repeated_where_asked():
    mesh = (("tp", 2),)
    once, again = (Remat("full", ops=ops)(*joint(mesh))[0] for ops in ({}, {"all_gather": "recompute"}))
    assert count(again, reshard.all_gather, "backward") > count(once, reshard.all_gather, "backward")


def test_offloaded_values_leave_after_the_forward_and_return_a_layer_ahead():
    program, report = Remat("offload")(*joint(n_blocks=3))
    nodes = list(program.graph.nodes)
    copies = [n for n in program.calls() if n.target is aten.clone.default and ir.phase(n) == "backward"]
    assert copies and report.counts["offloaded_bytes"] > 0
    for back in copies:
        (host,) = back.all_input_nodes
        (source,) = host.all_input_nodes
        assert not any(ir.phase(u) == "backward" for u in source.users)  # the value itself dies with the forward
        uses = [n for n in source.users if ir.phase(n) == "forward" and n is not host]
        assert all(nodes.index(u) < nodes.index(host) for u in uses)
    block = {node: str(ir.layer(node) or "") for node in program.calls()}
    returned = {block[n] for n in copies}
    assert returned == {"blocks.0", "blocks.1", "blocks.2"}
    first = next(n for n in program.calls() if ir.phase(n) == "backward" and block[n] == "blocks.2")
    ahead = [n for n in copies if block[n] == "blocks.1"]
    assert all(nodes.index(n) < nodes.index(last_of(program, block, "blocks.2")) for n in ahead) and first


def test_on_cuda_copies_run_on_a_stream_of_their_own():
    program, ctx = two_layers(device="cuda")
    program, _ = Remat("offload", regather=False)(program, ctx)
    silu = next(n for n in program.calls() if n.name == "silu")
    out = next(n for n in silu.users if n.target is offload)
    host = next(n for n in out.users if n.target is there)
    back = next(n for n in host.users if n.target is reload)
    value = next(n for n in back.users if n.target is there)
    assert host.args[1] is silu and value.args[1] is host  # its memory is free then
    names = [n.name for n in (out, host, back, value)]
    wanted = ["matmul", names[0], "matmul_1", names[1], "ones_like", names[2], "mul", names[3], "mul_1"]
    assert [n.name for n in program.calls() if n.name in wanted] == wanted
    avals = abstract_eval(program, ctx)
    assert not peak_of(Ledger(program, avals)).alive.keys() & (avals.storages(out) | avals.storages(host))  # the host's, not the GPU's


def last_of(program, block, name):
    return [n for n in program.calls() if ir.phase(n) == "backward" and block[n] == name][-1]


def test_most_of_what_none_keeps_is_offloaded():
    counts = {policy: Remat(policy)(*joint(n_blocks=3))[1].counts for policy in ("none", "offload")}
    assert counts["offload"]["offloaded_bytes"] > counts["none"]["saved_bytes_after"] / 2


@pytest.mark.parametrize(("option", "what"), [("modules", "module"), ("ops", "operator of the forward")])
def test_a_pattern_that_matches_nothing_is_refused(option, what):
    with pytest.raises(ir.Refused, match=rf"passes.remat.{option}: no {what} is named like 'blokcs.\*'"):
        Remat("full", **{option: {"blokcs.*": "save"}})(*joint())


# ---- a budget --------------------------------------------------------------------------------------


@functools.cache
def peaks() -> tuple[int, int]:
    """Return the predicted peak bytes of four layers with all of them recomputed, and with none."""
    program, ctx = joint((), 4)
    remat = Remat("full")
    free = {node for node, item in remat.decisions(program, {}).items() if item.action == "recompute"}
    return remat.peak(program, ctx, set(), free), remat.peak(program, ctx, set(), set())


@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.sample(2)
def test_a_budget_is_kept_to_and_used(part):
    least, largest = peaks()
    budget = int(least + part * (largest - least))
    program, ctx = joint((), 4)
    result, report = Remat("budget", budget_bytes=budget)(program, ctx)
    peak_bytes = peak_of(Ledger(result, abstract_eval(result, ctx))).bytes
    assert peak_bytes <= budget
    assert report.counts["recomputed"] <= Remat("full")(program, ctx)[1].counts["recomputed"]
    assert (report.counts["recomputed"] == 0) == (part == 1.0)


def test_more_memory_never_repeats_more_work():
    least, largest = peaks()
    program, ctx = joint((), 4)
    budgets = [int(least + k / 8 * (largest - least)) for k in range(9)]
    work = [fitted_flops(Remat("budget", budget_bytes=b)(program, ctx)[1].notes[0]) for b in budgets]
    assert work[0] == max(work) > work[-1] == 0


def fitted_flops(note: str) -> int:
    return int(re.search(r"([\d,]+) FLOPs repeated", note)[1].replace(",", ""))


def test_a_budget_weighs_products_by_the_machine():
    """Check that a matmul that is short compared with its memory traffic costs its bytes, otherwise its FLOPs."""
    program, ctx = joint((), 4)
    avals = abstract_eval(program, ctx)
    (product, *_) = (n for n in program.calls() if name_of(n) == "mm" and ir.phase(n) == "forward")
    flops = count_flops(product, avals)
    cost = [pose(program, avals, {product}, Balance(flops_per_moved_byte=f)).cost[product] for f in (1e-3, 1e-2, 1e9)]
    assert cost[:2] == [pytest.approx(1e3 * flops), pytest.approx(1e2 * flops)] and 0 < cost[2] < flops


def test_an_impossible_budget_says_what_is_possible():
    least, _ = peaks()
    with pytest.raises(ir.Refused, match=f"the least possible for this model, batch and mesh is {least / 2**30:.4g}"):
        Remat("budget", budget_bytes=least - 1)(*joint((), 4))


def test_a_budget_needs_a_number():
    with pytest.raises(ir.Refused, match="passes.remat.budget_gib: policy=budget needs it"):
        Remat("budget")(*joint())


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("regather", [True, False])
def test_each_parameter_is_gathered_once_a_phase(policy, regather):
    program, report = Remat(policy, regather)(*joint(FSDP))
    for node, entry in zip(program.placeholders(), program.inputs, strict=True):
        if entry.kind == "parameter":
            phases = [ir.phase(user) for user in node.users if user.target is reshard.all_gather]
            again = regather and entry.name != "embed.weight"  # the gradient of a look-up does not read the table
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


# ---- sums of products -------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A layer with low-rank terms, as in LoRA; with `bent` the second term has another use."""

    def __init__(self, bent: bool):
        super().__init__()
        self.base = torch.nn.Linear(8, 12, bias=False).requires_grad_(False)
        self.a, self.b = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 12, bias=False)
        self.back, self.bent = torch.nn.Linear(12, 8, bias=False), bent

    def forward(self, x):
        more = self.b(self.a(x))
        return x + self.back(torch.tanh(self.base(x) + 2.0 * (more * more if self.bent else more)))


class AdaptedStack(torch.nn.Module):
    def __init__(self, bent: bool):
        super().__init__()
        self.layers = torch.nn.ModuleList(Adapted(bent) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("bent", "width"), [(False, (2 + 12 + 8)), (True, (2 + 12 + 12 + 8))], ids=["sum", "terms"])
def test_of_two_products_that_are_only_added_the_sum_is_kept(bent, width):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4, 5, 8, dtype=torch.float64)} for _ in LRS]
    step = trained_alike(AdaptedStack(bent).double(), lambda m, b: m(b["x"]).square().mean(), data, {"dp_shard": 2},
                         NO_DECAY, passes={"remat": {"policy": "selective"}})
    (report,) = (p["report"] for p in step.report["passes"] if p["name"] == "remat")
    saved = report["counts"]["saved_bytes_after"]
    ours = 2 * 10 * width * 8  # two layers, ten tokens per rank, in fp64
    assert ours <= saved < ours + 10 * 12 * 8, report
