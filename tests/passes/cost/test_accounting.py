"""Costs read from a graph, compared with arithmetic; outputs of nodes, compared with running them."""

from __future__ import annotations

import operator

import pytest
import torch
from small_programs import Small, cut
from torch.utils.flop_counter import FlopCounterMode

from passes.cost.accounting import Ledger, Traffic, summed
from passes.ir import ir
from passes.ir.spec import Spec
from passes.ops import reshard
from passes.sharding.collectives import Collectives
from passes.torch_private import c10d
from passes.trace.abstract_eval import abstract_eval, tensors

aten = torch.ops.aten
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def costs(small: Small, *results):
    program = small.program([("metric", f"m{i}", node, Spec.whole(tuple(ir.example(node).shape)))
                             for i, node in enumerate(results)])
    return summed(Ledger(program, abstract_eval(program, small.ctx)))


# ---- bytes on the reduce_dtype -----------------------------------------------------------------------------

# operator and its arguments after x [6, 5] fp32 -> kind, bytes that each of 4 ranks sends
SENT = {
    "all_gather": (reshard.all_gather, (0, "tp", 4, 24, F32, None), "all_gather", 3 * 6 * 5 * 4),
    "all_gather in bf16": (reshard.all_gather, (0, "tp", 4, 24, BF16, F32), "all_gather", 3 * 6 * 5 * 2),
    "all_gather_invariant": (reshard.all_gather_invariant, ("axis_index", 0, "tp", 4, 24), "all_gather", 3 * 6 * 5 * 4),
    "reduce_scatter, padded": (reshard.reduce_scatter, (0, "tp", 4, F32, None), "reduce_scatter", 3 * 2 * 5 * 4),
    "reduce_scatter in fp64": (reshard.reduce_scatter, (0, "tp", 4, F32, F64), "reduce_scatter", 3 * 2 * 5 * 8),
    "psum": (reshard.psum, ("tp", F32, None), "all_reduce", 2 * 3 * 6 * 5 * 4 // 4),
    "psum in bf16": (reshard.psum, ("tp", F32, BF16), "all_reduce", 2 * 3 * 6 * 5 * 2 // 4),
    "pmax": (reshard.pmax, ("tp",), "all_reduce", 2 * 3 * 6 * 5 * 4 // 4),
    "all_to_all, padded": (reshard.all_to_all, (0, 1, 20, "tp", 4), "all_to_all", 3 * 2 * 5 * 4),
    "invariant_to_replicate": (reshard.invariant_to_replicate, ("tp", None), None, 0),
    "invariant_to_shard": (reshard.invariant_to_shard, ("axis_index", 0, "tp", 4), None, 0),
}


def exchange(op, args) -> tuple[ir.Program, ir.Context]:
    small = Small(tp=4)
    x, axis_index = small.input("x", cut((6, 5)), "batch", F32), small.axis_index("tp")
    out = small.call(op, x, *(axis_index if a == "axis_index" else a for a in args))
    return small.program([("metric", "m", out, Spec.whole(tuple(ir.example(out).shape)))]), small.ctx


@pytest.mark.parametrize("case", SENT)
def test_a_boundary_operator_and_its_expansion_send_the_same_bytes(case):
    op, args, kind, sent_bytes = SENT[case]
    expected = (Traffic(kind, "tp", 1, sent_bytes),) if kind else ()
    program, ctx = exchange(op, args)
    expanded, _ = Collectives()(program, ctx)
    for stage in (program, expanded):
        assert summed(Ledger(stage, abstract_eval(stage, ctx))).traffic == expected


def test_traffic_is_added_by_kind_and_axis():
    small = Small(dp_shard=2, tp=2)
    x = small.input("x", cut((8,)), "batch", F32)
    sums = [small.call(reshard.psum, x, axis, F32, None) for axis in ("tp", "dp_shard", "tp")]
    full = small.call(reshard.all_gather, x, 0, "tp", 2, 16, F32, None)
    assert costs(small, *sums, full).traffic == (
        Traffic("all_gather", "tp", 1, 32), Traffic("all_reduce", "dp_shard", 1, 32), Traffic("all_reduce", "tp", 2, 64))


def test_a_coalesced_collective_sends_what_its_parts_do():
    small = Small(tp=2)
    x, y = small.input("x", cut((8,)), "batch", F32), small.input("y", cut((2,)), "batch", F32)
    both = small.call(c10d.all_reduce_coalesced.default, [x, y], "sum", "tp")
    parts = [small.call(c10d.wait_tensor.default, small.call(operator.getitem, both, i)) for i in range(2)]
    assert costs(small, *parts).traffic == (Traffic("all_reduce", "tp", 1, 40),)


# ---- FLOPs -------------------------------------------------------------------------------------------


def test_flops_are_those_that_pytorch_counts_when_it_runs():
    """Undecomposed forward operators, compared with PyTorch's counter, which sees them decomposed on real tensors."""
    small = Small()
    x, w = small.input("x", cut((2, 8, 6)), "batch", F32), small.input("w", cut((12, 6)), dtype=F32)
    q = small.call(aten.view.default, small.call(aten.linear.default, x, w), [2, 8, 2, 6])
    q = small.call(aten.transpose.int, q, 1, 2)
    a = small.call(aten.scaled_dot_product_attention.default, q, q, q)
    b = small.call(aten.matmul.default, a, small.call(aten.transpose.int, a, 2, 3))
    found = costs(small, b)
    real = torch.randn(2, 8, 6)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        h = torch.nn.functional.linear(real, torch.randn(12, 6)).view(2, 8, 2, 6).transpose(1, 2)
        h = torch.nn.functional.scaled_dot_product_attention(h, h, h)
        h @ h.transpose(2, 3)
    assert found.flops == {"forward": counter.get_total_flops()}


def test_flops_are_by_phase_and_the_cpu_attention_is_counted():
    small = Small()
    q = small.input("q", cut((1, 2, 8, 4)), "batch", F32)
    out = small.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    o, lse = (small.call(operator.getitem, out, i) for i in range(2))
    back = small.call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, o, q, q, q, o, lse, 0.0, False,
                      phase="backward")
    product = 2 * 2 * 8 * 8 * 4  # one [8, 4] @ [4, 8] of two heads
    assert costs(small, small.call(operator.getitem, back, 0)).flops == {"forward": 2 * product, "backward": 5 * product}


# ---- memory ------------------------------------------------------------------------------------------


def test_the_peak_counts_inputs_always_views_once_and_the_dead_not_at_all():
    small = Small()
    x = small.input("x", cut((10,)), "batch", F32)  # 40 bytes, alive throughout
    a = small.call(aten.neg.default, x)  # 40
    view = small.call(aten.view.default, a, [2, 5])
    b = small.call(aten.abs.default, view)  # 40; a dies here
    c = small.call(aten.cat.default, [b, b])  # 80; b dies here
    d = small.call(aten.sum.default, c)  # 4
    found = costs(small, d)
    assert (found.input_bytes, found.peak_bytes, found.peak_node) == (40, 40 + 40 + 80, c.name)


def test_writes_in_place_and_waits_take_no_memory():
    small = Small(tp=2)
    x = small.input("x", cut((10,)), "batch", F32)
    y = small.call(c10d.wait_tensor.default, small.call(c10d.all_reduce.default, x, "sum", "tp"))
    small.call(aten.copy_.default, x, y)
    assert costs(small, small.call(aten.add_.Tensor, x, y)).peak_bytes == 80


def test_a_record_of_a_replaced_node_does_not_mislead():
    """Users of a replaced node keep records of its old storage; the estimate follows the graph."""
    small = Small()
    x = small.input("x", cut((10,)), "batch", F32)
    old, new = small.call(aten.neg.default, x), small.call(aten.abs.default, x)
    view = small.call(aten.view.default, old, [2, 5])
    view.replace_input_with(old, new)
    small.builder.graph.erase_node(old)
    assert costs(small, small.call(aten.neg.default, view)).peak_bytes == 120


# ---- the sweep ------------------------------------------------------------------------------------------


def test_the_sweep_gives_shapes_strides_and_dtypes_as_pytorch_does():
    small = Small()
    x = small.input("x", cut((4, 6)), "batch", F32)
    pieces = small.call(aten.split.Tensor, x, 2, 1)
    calls = [
        lambda x: small.call(aten.t.default, x),
        lambda x: small.call(aten.mul.Tensor, x, 2),
        lambda x: small.call(aten.mul.Tensor, x, 2.0),  # is not the call before, though 2 == 2.0
        lambda x: small.call(aten.slice.Tensor, x, 0, 1, 3),
        lambda x: small.call(aten._to_copy.default, x, dtype=torch.int64),
        lambda x: small.call(aten.topk.default, x, 1),
    ]
    nodes = [call(x) for call in calls]
    ints = small.input("n", cut((3,)), "batch", torch.int64)
    nodes += [small.call(aten.mul.Tensor, ints, 2), small.call(aten.mul.Tensor, ints, 2.0)]
    part = small.call(operator.getitem, pieces, 1)
    program = small.program([("metric", "m", part, Spec.whole((4, 2)))])
    avals = abstract_eval(program, small.ctx)
    for node in (x, part, *nodes):
        recorded_parts = ir.value(node) if isinstance(ir.value(node), (tuple, list)) else [ir.value(node)]
        for value, recorded in zip(tensors(avals.values[node]), recorded_parts, strict=True):
            assert value.layout.shape == tuple(recorded.shape)
            assert value.layout.stride == recorded.stride()
            assert value.layout.dtype == recorded.dtype
    assert avals.storages(part) == avals.storages(x) == avals.storages(nodes[0])
    assert not avals.storages(nodes[1]) & avals.storages(x)


def test_answers_are_asked_once_and_kept_with_the_context():
    calls = []

    def double(x):
        calls.append(tuple(x.shape))
        return x * 2

    small = Small()
    x, y = small.input("x", cut((3,)), "batch"), small.input("y", cut((4,)), "batch")
    nodes = [small.call(double, n) for n in (x, x, y)]
    program = small.program([("metric", "m", nodes[2], Spec.whole((4,)))])
    calls.clear()
    first = abstract_eval(program, small.ctx)
    assert calls == [(3,), (4,)]
    assert first.storages(nodes[0]) != first.storages(nodes[1])
    abstract_eval(program.copy(), small.ctx)
    assert len(calls) == 2


def test_an_operator_that_refuses_is_named():
    small = Small()
    x = small.input("x", cut((3,)), "batch")
    node = small.call(aten.neg.default, x)
    program = small.program([("metric", "m", node, Spec.whole((3,)))])
    node.target = aten.mm.default
    node.args = (x, x)
    with pytest.raises(ir.CompileError, match=f"abstract_eval: %{node.name} RuntimeError: "):
        abstract_eval(program, small.ctx)
