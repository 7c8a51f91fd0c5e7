"""Merged collectives: fewer of them, with the same bits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from joint_programs import Tiny, body, count, equal, joint, plain, run, run_on
from torch import fx

from passes.communication.bucket import MIB, TOGETHER, Bucket
from passes.ir import ir
from passes.ir.printer import print_program
from passes.ir.spec import Factor, Spec
from passes.memory.remat import Remat
from passes.ops import reshard
from passes.update.accumulate import Accumulate, ApplyOnly
from passes.update.optimize import Optimize
from passes.update.optimizers import AdamW

aten = torch.ops.aten
FSDP, HSDP, TP = (("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2)), (("dp_shard", 2), ("tp", 2))
REPLICAS = (("dp_replicate", 2),)
F32 = torch.float32


def split(shape: tuple[int, ...], dim: int, *axes: str) -> Spec:
    """Return a tensor with one dim sharded."""
    return Spec(tuple((Factor(n, axes if d == dim else ()),) for d, n in enumerate(shape)))


# ---- small graphs ----------------------------------------------------------------------------------


def gather(tiny: Tiny, x: fx.Node, dim: int, size: int, axis: str = "dp_shard") -> fx.Node:
    return tiny.call(reshard.all_gather, x, dim, axis, 2, size, F32, None)


def scatter(tiny: Tiny, x: fx.Node, dim: int, parts: int = 2) -> fx.Node:
    return tiny.call(reshard.reduce_scatter, x, dim, "dp_shard", parts, F32, None, phase="backward")


def test_gathers_travel_together_at_the_first_of_them():
    tiny = Tiny(dp_shard=2)
    a, b = tiny.input("a", split((4, 2), 0, "dp_shard")), tiny.input("b", split((3, 5), 1, "dp_shard"))
    first = tiny.call(aten.neg.default, gather(tiny, a, 0, 4))
    second = tiny.call(aten.neg.default, gather(tiny, tiny.call(aten.abs.default, b), 1, 5))
    result, report = Bucket()(tiny.program(first, second), tiny.ctx)
    assert body(result) == """\
%abs_1 = abs(%b)
%movedim = movedim.int(%abs_1, 1, 0)
%reshape = reshape(%a, [-1])
%reshape_1 = reshape(%movedim, [-1])
%cat = cat([%reshape, %reshape_1])
%all_gather_2 = all_gather(%cat, 0, "dp_shard", 2, 26, f32, None)
%view = view(%all_gather_2, [2, -1])
%split_with_sizes = split_with_sizes(%view, [4, 9], 1)
%getitem = getitem(%split_with_sizes, 0)
%getitem_1 = getitem(%split_with_sizes, 1)
%reshape_2 = reshape(%getitem, [4, 2])
%narrow = narrow(%reshape_2, 0, 0, 4)
%reshape_3 = reshape(%getitem_1, [6, 3])
%narrow_1 = narrow(%reshape_3, 0, 0, 5)
%movedim_1 = movedim.int(%narrow_1, 0, 1)
%contiguous = contiguous(%movedim_1)
%neg = neg(%narrow)
%neg_1 = neg(%contiguous)"""
    assert (report.counts["all_gather_before"], report.counts["all_gather_after"]) == (2, 1)


@pytest.mark.parametrize(("parts", "dtype"), [(2, F32), (3, F32), (3, torch.bfloat16)])
@pytest.mark.sample(2)
def test_any_dim_remainder_and_dtype_give_the_same_bits(parts, dtype):
    shapes = {"a": ((4, 2), 0), "b": ((3, 5), 1), "c": ((7,), 0), "d": ((1, 1, 1), 2)}
    tiny, torch_random = Tiny(dp_shard=parts), torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=torch_random) for name, (shape, _) in shapes.items()}
    inputs = {name: tiny.input(name, split(shape, dim, "dp_shard")) for name, (shape, dim) in shapes.items()}
    results = []
    for name, (shape, dim) in shapes.items():
        full = tiny.call(reshard.all_gather, inputs[name], dim, "dp_shard", parts, shape[dim], dtype, None)
        partial = tiny.call(aten.mul.Tensor, full, full, phase="backward")
        summed = tiny.call(reshard.psum, partial, "dp_shard", F32, F32, phase="optimizer")
        largest = tiny.call(reshard.pmax, inputs[name], "dp_shard")
        results += [full, scatter(tiny, partial, dim, parts), summed, largest]
    program = tiny.program(*results)
    merged, report = Bucket()(program, tiny.ctx)
    assert equal(run_on(merged, tiny.ctx, values), run_on(program, tiny.ctx, values))
    times = (("before", 4), ("after", 1))
    assert report.counts == {f"{kind}_{when}": n for kind in ("all_gather", "reduce_scatter", "psum", "pmax") for when, n in times}
    for old, new in zip(program.results(), merged.results(), strict=True):
        assert ir.example(old).shape == ir.example(new).shape and ir.example(new).is_contiguous()


def test_users_of_a_reduction_move_behind_the_last():
    tiny = Tiny(dp_shard=2)
    x = tiny.input("x", Spec.whole((4,)), "batch")
    first = scatter(tiny, tiny.call(aten.exp.default, x, phase="backward"), 0)
    cast = tiny.call(aten.neg.default, first, phase="backward")
    second = scatter(tiny, tiny.call(aten.sin.default, x, phase="backward"), 0)
    program = tiny.program(cast, second)
    result, report = Bucket()(program, tiny.ctx)
    result.graph.lint()
    names = [node.name for node in result.calls()]
    assert report.counts["reduce_scatter_after"] == 1
    assert names.index("sin") < names.index("reduce_scatter_2") < names.index("neg")


def test_collectives_that_feed_each_other_crosswise_stay_in_order():
    tiny, spec = Tiny(dp_shard=2, tp=2), split((8,), 0, "dp_shard", "tp")
    a, b = tiny.input("a", spec), tiny.input("b", split((8,), 0, "tp", "dp_shard"))
    results = [gather(tiny, gather(tiny, a, 0, 4, "tp"), 0, 8), gather(tiny, gather(tiny, b, 0, 4), 0, 8, "tp")]
    program = tiny.program(*results)
    merged, _ = Bucket()(program, tiny.ctx)
    merged.graph.lint()
    values = {name: torch.arange(8.0) for name in "ab"}
    assert equal(run_on(merged, tiny.ctx, values), run_on(program, tiny.ctx, values))


def test_what_follows_a_write_into_an_input_is_left_alone():
    tiny = Tiny(dp_shard=2)
    a, b = (tiny.input(name, split((4,), 0, "dp_shard")) for name in "ab")
    first = gather(tiny, a, 0, 4)
    tiny.call(aten.copy_.default, b, a)
    program = tiny.program(first, gather(tiny, b, 0, 4))
    merged, _ = Bucket()(program, tiny.ctx)
    assert body(merged) == body(program)


def test_collectives_of_other_dtypes_and_wires_do_not_mix():
    tiny = Tiny(dp_replicate=2)
    x = tiny.input("x", Spec.whole((4,)), "batch")
    sums = [tiny.call(reshard.psum, tiny.call(aten.neg.default, x, phase="backward"), "dp_replicate", dtype, reduce_dtype,
                      phase="optimizer") for dtype in (F32, torch.float64) for reduce_dtype in (None, torch.bfloat16)]
    _, report = Bucket()(tiny.program(*sums), tiny.ctx)
    (effect,) = report.effects
    assert report.counts["psum_after"] == effect.total == 4 and not effect.done and not effect.unmet


# ---- a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "policy"), [(FSDP, "none"), ((("dp_shard", 3),), "none"), (HSDP, "none"),
                                              (FSDP, "full"), (TP, "full")], ids=str)
def test_merged_collectives_give_the_same_bits_and_the_input_is_left_alone(mesh, policy):
    _, ctx = joint(mesh)
    program, _ = Remat(policy)(*joint(mesh))
    text = print_program(program)
    merged, report = Bucket()(program, ctx)
    merged.graph.lint()
    assert equal(run(merged, ctx), plain(mesh))
    assert print_program(program) == text
    assert report.counts["all_gather_after"] < report.counts["all_gather_before"]


@pytest.mark.parametrize("policy", ["none", "full"])
def test_one_gather_and_one_reduce_scatter_a_layer_and_phase(policy):
    _, ctx = joint(FSDP)
    program, _ = Bucket()(Remat(policy)(*joint(FSDP))[0], ctx)
    result = Counter((n.target, ir.phase(n), ".".join(ir.module_path(n).split(".")[:2]))
                    for n in program.calls() if n.target in (reshard.all_gather, reshard.reduce_scatter))
    layers = ("blocks.0", "blocks.1")
    outside = [place for _, _, place in result if place not in layers]
    assert set(result.values()) == {1}
    assert {key for key in result if key[2] in layers} == {
        (reshard.all_gather, phase, layer) for phase in ("forward", "backward") for layer in layers
    } | {(reshard.reduce_scatter, "backward", layer) for layer in layers}
    assert len(outside) == 2 + 1 + 2  # embedding and head; the head again in the backward; the gradients of both


def test_activations_are_left_alone():
    program, ctx = joint(TP)
    merged, _ = Bucket()(program, ctx)

    def on_tp(p: ir.Program) -> Counter:
        return Counter(n.target for n in p.calls() if n.target in TOGETHER and "tp" in n.args)

    assert on_tp(merged) == on_tp(program) and on_tp(program)[reshard.reduce_scatter] > 0


def test_a_bucket_holds_at_most_its_bytes():
    program, ctx = joint(FSDP)
    limit = 450  # bytes; the largest parameter alone has 300, a layer 600
    merged, report = Bucket(limit / MIB)(program, ctx)
    gathers = [n for n in merged.calls() if n.target is reshard.all_gather]
    assert all(ir.example(n).numel() * 4 <= limit for n in gathers)
    assert len(gathers) == 1 + 2 * 2 + 1  # embedding, two per layer, norm with head
    assert equal(run(merged, ctx), plain(FSDP))


def test_a_bucket_of_nothing_merges_nothing():
    program, ctx = joint(FSDP)
    merged, report = Bucket(0)(program, ctx)
    assert body(merged) == body(program) and not report.notes


@pytest.mark.parametrize("mesh", [REPLICAS, HSDP], ids=str)
def test_a_whole_step_writes_the_same_bits(mesh):
    program, ctx = joint(mesh)
    step, _ = Optimize(AdamW(), max_norm=1.0)(program, ctx)
    merged, _ = Bucket()(step, ctx)
    merged.graph.lint()
    assert equal(run(merged, ctx), run(step, ctx))


def test_gradients_of_replicas_are_summed_once_a_layer():
    step, _ = Optimize(AdamW(), max_norm=1.0)(*joint(REPLICAS))
    merged, _ = Bucket()(step, joint(REPLICAS)[1])
    parameters = sum(i.kind == "parameter" for i in step.inputs)
    layers_and_the_rest = 2 + 1
    assert count(step, reshard.psum, "optimizer") == parameters
    assert count(merged, reshard.psum, "optimizer") == layers_and_the_rest


def test_microbatch_graphs_merge_too():
    program, ctx = joint(HSDP)
    add, _ = Accumulate()(program, ctx)
    apply, _ = Optimize(AdamW())(ApplyOnly()(program, ctx)[0], ctx)
    for part in (add, apply):
        merged, report = Bucket()(part, ctx)
        merged.graph.lint()
        assert equal(run(merged, ctx), run(part, ctx)) and report.notes


def test_a_negative_bucket_is_refused():
    with pytest.raises(ir.CompileError, match="bucket_mib is -1; must be >= 0"):
        Bucket(-1)(*joint(FSDP))
