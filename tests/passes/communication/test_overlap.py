"""Collectives next to computation: early starts, late waits, and the same bits."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from joint_programs import equal, joint, plain, run
from small_programs import Small, cut
from torch import fx

from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.schema import Config, MeshConfig, ModelConfig, TrainConfig
from compiler_trainer.planning.dry import compile_dry
from passes.check.verify import verify_spec
from passes.communication.bucket import Bucket
from passes.communication.layer_starts import matmuls_of
from passes.communication.node_order import in_flight, last_matmuls
from passes.communication.overlap import Overlap
from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.machine import Balance
from passes.ir.mesh import Mesh
from passes.ir.printer import print_program
from passes.ir.stages import Stage
from passes.lower.backends import lower_inductor
from passes.memory.remat import Remat
from passes.ops.shift import arrive, shift
from passes.sharding.collectives import Collectives
from passes.torch_private import c10d, register_axis_group
from passes.update.optimize import Optimize
from passes.update.optimizers import AdamW

aten = torch.ops.aten
F32 = torch.float32
SIDE = 64  # a matmul of square matrices takes 2 * 64^3 FLOPs, which hide 238 bytes


class Steps(Small):
    """A program whose nodes have labels."""

    def __init__(self, **mesh: int):
        super().__init__(**mesh)
        self.labels: dict[str, str] = {}
        self.nodes: dict[str, fx.Node] = {}

    def do(self, label: str, target, *args, phase: str = "backward", layer: int = 0):
        node = self.call(target, *args, phase=phase)
        ir.update(node, layer=Layer("layers", layer))
        self.labels[node.name], self.nodes[label] = label, node
        return node

    def square(self, name: str, kind="batch"):
        return self.input(name, cut((SIDE, SIDE)), kind, F32)

    def mm(self, label: str, a, b, **where):
        return self.do(label, aten.mm.default, a, b, **where)

    def sent(self, label: str, x, axis: str = "tp", **where):
        """Start a sum of a value over an axis."""
        return self.do(f"start {label}", c10d.all_reduce.default, x, "sum", axis, **where)

    def wait(self, label: str, start, **where):
        return self.do(f"wait {label}", c10d.wait_tensor.default, start, **where)

    def ended(self, *results) -> ir.Program:
        outputs = [("gradient", f"g{i}", node, cut(tuple(ir.example(node).shape))) for i, node in enumerate(results)]
        return self.program(outputs, Stage.EXPLICIT)

    def order(self, *results, prefetch: int = 1) -> list[str]:
        """Return the labels after the pass."""
        program = self.ended(*results)
        text = print_program(program)
        reordered, _ = Overlap(prefetch)(program, self.ctx)
        reordered.graph.lint()
        assert print_program(program) == text
        assert Counter(n.name for n in reordered.graph.nodes) == Counter(n.name for n in program.graph.nodes)
        return [self.labels[node.name] for node in reordered.calls() if node.name in self.labels]


# ---- gathers of parameters --------------------------------------------------------------------------


def three_layers() -> tuple[Steps, list]:
    """Build the forward of three layers, each gathering its weight right before use."""
    steps = Steps(dp_shard=2)
    x = steps.square("x")
    for i in range(3):
        shard = steps.input(f"w{i}", cut((SIDE, SIDE), dp_shard=0), "parameter", F32)
        where = {"phase": "forward", "layer": i}
        start = steps.do(f"gather {i}", c10d.all_gather_into_tensor.default, shard, 2, "dp_shard", **where)
        x = steps.mm(f"mm {i}", x, steps.wait(str(i), start, **where), **where)
    return steps, [x]


@pytest.mark.parametrize(
    ("prefetch", "order"),
    [
        (0, "gather 0, wait 0, mm 0, gather 1, wait 1, mm 1, gather 2, wait 2, mm 2"),
        (1, "gather 0, gather 1, wait 0, mm 0, gather 2, wait 1, mm 1, wait 2, mm 2"),
        (2, "gather 0, gather 1, gather 2, wait 0, mm 0, wait 1, mm 1, wait 2, mm 2"),
    ],
)
def test_weights_travel_while_the_layers_before_are_computed(prefetch, order):
    steps, results = three_layers()
    assert ", ".join(steps.order(*results, prefetch=prefetch)) == order


def test_what_comes_after_layers_is_gathered_after_them():
    """Check parameters before and after the layers: both are outside of layers, but in two runs."""
    steps = Steps(dp_shard=2)
    x = steps.square("x")
    for i, layer in enumerate([None, Layer("layers", 0), Layer("layers", 1), None]):
        shard = steps.input(f"w{i}", cut((SIDE, SIDE), dp_shard=0), "parameter", F32)
        start = steps.do(f"gather {i}", c10d.all_gather_into_tensor.default, shard, 2, "dp_shard", phase="forward")
        wait = steps.wait(str(i), start, phase="forward")
        x = steps.mm(f"mm {i}", x, wait, phase="forward")
        for node in (start, wait, x):
            ir.update(node, layer=layer)
    assert ", ".join(steps.order(x)) == (
        "gather 0, gather 1, wait 0, mm 0, gather 2, wait 1, mm 1, gather 3, wait 2, mm 2, wait 3, mm 3")


def test_a_gather_does_not_cross_a_write():
    steps = Steps(dp_shard=2)
    x, w = steps.square("x"), steps.input("w", cut((SIDE, SIDE), dp_shard=0), "parameter", F32)
    results = [x]
    for i in range(2):
        where = {"phase": "forward", "layer": i}
        start = steps.do(f"gather {i}", c10d.all_gather_into_tensor.default, w, 2, "dp_shard", **where)
        results.append(steps.mm(f"mm {i}", results[-1], steps.wait(str(i), start, **where), **where))
        steps.do(f"write {i}", aten.add_.Tensor, w, 1.0, **where)
    order = steps.order(*results[1:])
    assert order.index("write 0") < order.index("gather 1")


def test_what_is_sent_is_not_written_before_the_wait():
    steps = Steps(dp_shard=2)
    x, w = steps.square("x"), steps.input("w", cut((SIDE, SIDE), dp_shard=0), "parameter", F32)
    where = {"phase": "forward", "layer": 0}
    full = steps.wait("0", steps.do("gather", c10d.all_gather_into_tensor.default, w, 2, "dp_shard", **where), **where)
    steps.do("write", aten.add_.Tensor, w, 1.0, **where)
    order = steps.order(steps.mm("mm", x, full, **where))
    assert order.index("gather") < order.index("wait 0") < order.index("write") < order.index("mm")


# ---- gradients --------------------------------------------------------------------------------------


def test_gradients_travel_while_the_layer_before_is_computed_and_no_longer():
    steps = Steps(dp_shard=2)
    x, copies = steps.square("x"), []
    for i in (2, 1, 0):
        x = steps.mm(f"mm {i}", x, x, layer=i)
        start = steps.sent(str(i), x, "dp_shard", layer=i)
        copies.append(steps.do(f"copy {i}", aten.clone.default, steps.wait(str(i), start, layer=i), layer=i))
    updates = [steps.call(aten.neg.default, copy, phase="optimizer") for copy in copies]
    assert steps.order(*updates) == [
        "mm 2", "start 2", "mm 1", "wait 2", "start 1", "mm 0", "wait 1", "start 0",
        "copy 2", "copy 1", "wait 0", "copy 0"]  # copies stand where the optimizer reads them


def test_gradients_reduced_over_two_axes_are_sent_on_a_layer_later():
    steps = Steps(dp_replicate=2, dp_shard=2)
    x, results = steps.square("x"), []
    for i in (3, 2, 1, 0):
        x = steps.mm(f"mm {i}", x, x, layer=i)
        first = steps.wait(f"{i}", steps.sent(f"{i}", x, "dp_shard", layer=i), layer=i)
        pair = steps.do(f"cat {i}", aten.cat.default, [first, first], layer=i)
        results.append(steps.wait(f"{i} again", steps.sent(f"{i} again", pair, "dp_replicate", layer=i), layer=i))
    updates = [steps.call(aten.neg.default, result, phase="optimizer") for result in results]
    assert steps.order(*updates)[:16] == [
        "mm 3", "start 3",
        "mm 2", "wait 3", "cat 3", "start 3 again", "start 2",
        "mm 1", "wait 2", "cat 2", "start 2 again", "wait 3 again", "start 1",
        "mm 0", "wait 1", "cat 1"]


def test_gradients_summed_over_replicas_in_the_update_are_sent_on_a_layer_later():
    """Check that a sum over replicas, in the optimizer and in its parameter's layer, does not split two layers."""
    steps = Steps(dp_replicate=2, dp_shard=2)
    x, results = steps.square("x"), []
    for i in (3, 2, 1, 0):
        x = steps.mm(f"mm {i}", x, x, layer=i)
        first = steps.wait(f"{i}", steps.sent(f"{i}", x, "dp_shard", layer=i), layer=i)
        pair = steps.call(aten.cat.default, [first, first], phase="optimizer")
        again = steps.call(c10d.all_reduce.default, pair, "sum", "dp_replicate", phase="optimizer")
        results.append(steps.call(c10d.wait_tensor.default, again, phase="optimizer"))
        for node, label in zip((pair, again, results[-1]), ("cat", "start again", "wait again")):
            ir.update(node, layer=Layer("layers", i))
            steps.labels[node.name] = f"{label} {i}"
    updates = [steps.call(aten.neg.default, result, phase="optimizer") for result in results]
    assert steps.order(*updates)[:14] == [
        "mm 3", "start 3",
        "mm 2", "wait 3", "cat 3", "start again 3", "start 2",
        "mm 1", "wait 2", "cat 2", "start again 2", "wait again 3", "start 1",
        "mm 0"]


def test_a_gradient_is_sent_after_all_that_runs_in_one_kernel_with_it():
    steps = Steps(dp_shard=2)
    x = steps.square("x")
    first = steps.mm("mm 1", x, x, layer=1)
    start = steps.sent("1", first, "dp_shard", layer=1)
    result = steps.wait("1", start, layer=1)
    last = steps.mm("mm 0", steps.do("sum", aten.add.Tensor, first, x, layer=1), x, layer=0)
    update = steps.call(aten.neg.default, result, phase="optimizer")
    assert steps.order(update, last) == ["mm 1", "sum", "start 1", "mm 0", "wait 1"]


def test_the_gradient_of_a_weight_is_computed_while_that_of_the_input_travels():
    steps = Steps(tp=2)
    g, w, x = steps.square("g"), steps.square("w"), steps.square("x")
    small = steps.input("small", cut((1, 16)), "batch", F32)
    of_weight, of_input = steps.mm("dw", x, g), steps.mm("dx", g, w)
    start = steps.sent("dx", steps.do("cut", aten.add.Tensor, small, steps.do("sum", aten.sum.default, of_input)))
    last = steps.mm("next", of_input, steps.do("use", aten.mul.Tensor, of_input, steps.do(
        "sum again", aten.sum.default, steps.wait("dx", start))))
    assert steps.order(of_weight, last) == [
        "dx", "sum", "cut", "start dx", "dw", "wait dx", "sum again", "use", "next"]


def test_no_more_is_moved_than_travels_long_enough():
    """Check that of two matmuls one hides the 64 bytes in flight; the nearer one moves."""
    steps = Steps(tp=2)
    x, small = steps.square("x"), steps.input("small", cut((1, 16)), "batch", F32)
    dw = [steps.mm(f"dw {i}", x, x) for i in range(2)]
    chain = steps.mm("dx", x, x)
    start = steps.sent("dx", steps.do("cut", aten.mul.Tensor, small, steps.do("sum", aten.sum.default, chain)))
    last = steps.mm("next", chain, steps.do("use", aten.mul.Tensor, chain, steps.do(
        "sum again", aten.sum.default, steps.wait("dx", start))))
    assert steps.order(*dw, last) == [
        "dw 0", "dx", "sum", "cut", "start dx", "dw 1", "wait dx", "sum again", "use", "next"]


@pytest.mark.parametrize(("width", "first"), ((64, "norm"), (16, "a")))
def test_what_needs_no_product_starts_earlier_but_not_beside_what_takes_longer(width, first):
    """Check that a matmul hides nothing next to a sum of its axis that takes as long, but does next to a short one."""
    steps = Steps(tp=2)
    x, saved = steps.square("x"), steps.input("saved", cut((1, 16)), "batch", F32)
    large = steps.input("large", cut((1, width)), "batch", F32)
    chain = steps.mm("a", x, x)
    received = steps.sent("first", steps.do("cut", aten.mul.Tensor, large, steps.do("sum", aten.sum.default, chain)))
    beside = steps.mm("beside", x, x)
    waited = steps.do("sum of it", aten.sum.default, steps.wait("first", received))
    again = steps.sent("again", steps.do("norm", aten.neg.default, saved))
    last = steps.mm("next", chain, steps.do("use", aten.mul.Tensor, chain, steps.do(
        "sum again", aten.sum.default, steps.do("both", aten.add.Tensor, waited, steps.wait("again", again)))))
    order = steps.order(beside, last)
    assert order[0] == first
    assert order.index("start first") < order.index("beside")
    assert order.index("start again") < order.index("a" if first == "norm" else "beside")


def forward(steps: Steps):
    """Build matmuls of three weights of a layer; the first result is sent, and waited for before the others."""
    where = {"phase": "forward"}
    x, large = steps.square("x"), steps.input("large", cut((1, 1024)), "batch", F32)
    values = steps.do("sum", aten.sum.default, steps.mm("sent", x, x, **where), **where)
    start = steps.sent("rows", steps.do("cut", aten.mul.Tensor, large, values, **where), **where)
    wait = steps.wait("rows", start, **where)
    return x, steps.do("use", aten.sum.default, wait, **where), where


def test_what_travels_is_waited_for_after_products_that_do_not_need_it():
    """Check matmuls like those of shared experts; a matmul that does not hide the whole transfer hides some of it."""
    steps = Steps(tp=2)
    x, used, where = forward(steps)
    shared = steps.mm("shared 1", steps.mm("shared 0", x, x, **where), x, **where)
    pair = steps.do("add", aten.add.Tensor, shared, used, **where)
    other = steps.mm("other layer", pair, x, phase="forward", layer=1)
    assert steps.order(other) == [
        "sent", "sum", "cut", "start rows", "shared 0", "shared 1", "wait rows", "use", "add", "other layer"]


def test_what_travels_is_waited_for_before_what_comes_after_it_and_before_writes_of_what_it_reads():
    for label in ("start more", "write"):
        steps = Steps(tp=2)
        x, used, where = forward(steps)
        if label == "write":
            steps.do(label, aten.add_.Tensor, steps.nodes["cut"], 1.0, **where)
        else:
            more = steps.wait("more", steps.sent("more", steps.nodes["cut"], **where), **where)
            used = steps.do("both", aten.add.Tensor, used, steps.do("sum more", aten.sum.default, more, **where), **where)
        shared = steps.mm("shared", x, x, **where)
        order = steps.order(steps.do("add", aten.add.Tensor, shared, used, **where))
        assert order.index("wait rows") < order.index("shared"), label
        assert order.index("wait rows") < order.index("write" if label == "write" else "wait more"), label


def test_it_starts_before_as_many_products_as_there_are_though_they_do_not_hide_it():
    steps = Steps(tp=2)
    where = {"phase": "forward"}
    x, large = steps.square("x"), steps.input("large", cut((1, 1024)), "batch", F32)
    chunk = steps.mm("chunk 1", steps.mm("chunk 0", x, x, **where), x, **where)
    start = steps.sent("rows", steps.do("next chunk", aten.neg.default, large, **where), **where)
    used = steps.do("use", aten.sum.default, steps.wait("rows", start, **where), **where)
    assert steps.order(steps.do("add", aten.add.Tensor, chunk, used, **where))[:4] == [
        "next chunk", "start rows", "chunk 0", "chunk 1"]


def test_what_is_of_no_layer_stays_out_of_layers():
    """Check the count of all labels, whose sum would make the last layer's body differ from the others'."""
    steps = Steps(tp=2)
    where = {"phase": "forward"}
    x, labels = steps.square("x"), steps.input("labels", cut((1, 1024)), "batch", F32)
    layer, head = steps.mm("layer", x, x, **where), steps.mm("head", x, x, **where)
    last = steps.mm("second head", x, x, **where)
    start = steps.sent("count", steps.do("neg", aten.neg.default, labels, **where), **where)
    wait = steps.wait("count", start, **where)
    for node in (head, last, start, wait, steps.nodes["neg"]):
        ir.update(node, layer=None)
    loss = steps.do("loss", aten.mul.Tensor, head, steps.do("sum", aten.sum.default, wait, **where), **where)
    order = steps.order(steps.do("add", aten.add.Tensor, layer, loss, **where), last)
    assert order[:5] == ["layer", "head", "neg", "start count", "second head"]


def test_a_gradient_that_is_waited_for_already_does_not_move():
    """Check that its wait would otherwise move to its send."""
    steps = Steps(tp=2, dp_shard=2)
    g, large = steps.square("g"), steps.input("large", cut((1, 1024)), "batch", F32)
    of_weight = steps.mm("dw 1", g, g, layer=1)
    dx = steps.mm("dx", g, g, layer=1)
    reduced = steps.wait("dw 1", steps.sent("dw 1", of_weight, "dp_shard", layer=1), layer=1)
    later = steps.sent("dw 0", steps.mm("dw 0", dx, g), "dp_shard")
    rows = steps.sent("rows", steps.do("cut", aten.mul.Tensor, large, steps.do("sum", aten.sum.default, dx)))
    last = steps.mm("last", dx, steps.do("use", aten.mul.Tensor, dx, steps.do(
        "sum again", aten.sum.default, steps.wait("rows", rows))))
    update = steps.call(aten.neg.default, reduced, phase="optimizer")
    order = steps.order(update, steps.call(aten.neg.default, steps.wait("dw 0", later), phase="optimizer"), last)
    assert order.index("dw 1") < order.index("start rows")


def test_gradients_of_weights_stay_for_what_nothing_else_hides():
    """Check that the first send is hidden by the matmul of the next chunk, and the second by a weight gradient."""
    steps = Steps(tp=2)
    g, large = steps.square("g"), steps.input("large", cut((1, 1024)), "batch", F32)
    first = steps.do("use 1", aten.sum.default, steps.wait("rows 1", steps.sent("rows 1", large)))
    of_weight, dx = steps.mm("dw 2", g, g), steps.mm("dx 2", g, g)
    rows = steps.sent("rows 2", steps.do("cut", aten.mul.Tensor, large, steps.do("sum", aten.sum.default, dx)))
    pair = steps.do("both", aten.add.Tensor, first, steps.do("use 2", aten.sum.default, steps.wait("rows 2", rows)))
    order = steps.order(of_weight, steps.mm("last", dx, steps.do("use", aten.mul.Tensor, dx, pair)))
    assert order.index("start rows 1") < order.index("dx 2") < order.index("wait rows 1")
    assert order.index("start rows 2") < order.index("dw 2") < order.index("wait rows 2")


def test_what_a_communicator_was_given_before_goes_first():
    """Check that the second of two sends, which begins after the matmul that hides the first, gets another matmul."""
    steps = Steps(tp=2)
    x, small = steps.square("x"), steps.input("small", cut((1, 48)), "batch", F32)
    dw = [steps.mm(f"dw {i}", x, x) for i in range(3)]
    chain = steps.mm("dx", x, x)
    values = steps.do("cut", aten.mul.Tensor, small, steps.do("sum", aten.sum.default, chain))
    starts = [steps.sent(label, values) for label in "ab"]
    used = [steps.do(f"use {label}", aten.sum.default, steps.wait(label, start)) for label, start in zip("ab", starts)]
    pair = steps.do("both", aten.add.Tensor, *used)
    last = steps.mm("next", chain, steps.do("use", aten.mul.Tensor, chain, pair))
    assert steps.order(*dw, last) == ["dw 0", "dx", "sum", "cut", "start a", "start b", "dw 2", "wait a", "use a", "dw 1",
                                      "wait b", "use b", "both", "use", "next"]  # fmt: skip


def test_what_waits_for_another_does_not_take_what_that_has_beside_it():
    """Check a gather of a reduction's result, as between two tensor-parallel layers."""
    steps = Steps(tp=2)
    x, small = steps.square("x"), steps.input("small", cut((1, 48)), "batch", F32)
    dw = [steps.mm(f"dw {i}", x, x) for i in range(2)]
    chain = steps.mm("dx", x, x)
    used = steps.do("sum", aten.sum.default, chain)
    for label in ("first", "second"):
        start = steps.sent(label, steps.do(f"cut {label}", aten.mul.Tensor, small, used))
        used = steps.do(f"use {label}", aten.sum.default, steps.wait(label, start))
    last = steps.mm("next", chain, steps.do("use", aten.mul.Tensor, chain, used))
    assert steps.order(*dw, last) == ["dx", "sum", "cut first", "start first", "dw 1", "wait first", "use first", "cut second",
                                      "start second", "dw 0", "wait second", "use second", "use", "next"]  # fmt: skip


def test_what_is_sent_does_not_start_before_it_is_written():
    steps = Steps(tp=2)
    x, saved = steps.square("x"), steps.input("saved", cut((1, 16)), "batch", F32)
    steps.do("write", aten.add_.Tensor, saved, 1.0)
    beside = steps.mm("beside", x, x)
    received = steps.wait("rows", steps.sent("rows", steps.do("neg", aten.neg.default, saved)))
    last = steps.mm("last", beside, steps.do("use", aten.mul.Tensor, x, steps.do("sum", aten.sum.default, received)))
    assert steps.order(last)[:4] == ["write", "neg", "start rows", "beside"]
    steps = Steps(tp=2)
    x, saved = steps.square("x"), steps.input("saved", cut((1, 16)), "batch", F32)
    beside = steps.mm("beside", x, x)
    steps.do("write", aten.add_.Tensor, saved, 1.0)
    received = steps.wait("rows", steps.sent("rows", steps.do("neg", aten.neg.default, saved)))
    last = steps.mm("last", beside, steps.do("use", aten.mul.Tensor, x, steps.do("sum", aten.sum.default, received)))
    order = steps.order(last)
    assert order.index("write") < order.index("neg")


@pytest.mark.parametrize(("kind", "ranks", "flops"), (
    ("all_to_all", 8, 100 * 2.0), ("all_to_all", 16, 100 * 8 / 15 * 50.0), ("all_gather", 16, 100 * 1 / 15 * 50.0),
    ("all_gather", 64, 100 * 7 / 63 * 50.0), ("shift", 16, 100 * 50.0),
))
def test_between_nodes_more_is_computed_beside_what_travels(kind, ranks, flops):
    """Check that for an all-to-all the bytes that leave a node count, for a ring of gathers a node's share."""
    result = Balance(8, 2.0, 25.0).flops(kind, 100, Mesh((("ep", ranks),)), "ep")
    assert result == pytest.approx(flops)


def test_rings_are_waited_for_late_and_what_they_send_stays_until_then():
    steps = Steps(cp=2)
    x = steps.square("x")
    sent = steps.mm("own", x, x, phase="forward")
    received = steps.do("shift", shift, sent, "cp", 1, phase="forward")
    come = steps.do("arrive", arrive, received, sent, phase="forward")
    beside = steps.mm("beside", x, x, phase="forward")
    last = steps.mm("last", come, beside, phase="forward")
    assert steps.order(last) == ["own", "shift", "beside", "arrive", "last"]


# ---- a model ----------------------------------------------------------------------------------------

MESHES = [
    (("dp_shard", 2),), (("dp_shard", 3),), (("dp_replicate", 2), ("dp_shard", 2)), (("dp_shard", 2), ("tp", 2)),
    (("cp", 2), ("tp", 2)),
]


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_the_bits_stay_and_so_does_every_operator(mesh, policy):
    program, ctx = joint(mesh)
    for step in (Remat(policy), Bucket(), Collectives()):
        program, _ = step(program, ctx)
    text = print_program(program)
    reordered, report = Overlap()(program, ctx)
    verify_spec(reordered, ctx)
    assert equal(run(reordered, ctx), plain(mesh))
    assert print_program(program) == text
    operators = [sorted(line for line in lines.splitlines() if "%" in line) for lines in (print_program(reordered), text)]
    assert operators[0] == operators[1]
    assert report.counts["collectives"] == len(list(in_flight(program.graph.nodes)))
    assert report.counts["with_products_beside_before"] < report.counts["with_products_beside_after"] == (
        len(last_matmuls(reordered.graph, matmuls_of(reordered.graph)))
    )


def test_a_step_with_an_optimizer_keeps_its_bits():
    mesh = (("dp_shard", 2), ("tp", 2))
    program, ctx = joint(mesh)
    for step in (Remat("none"), Optimize(AdamW(), 1.0), Bucket(), Collectives()):
        program, _ = step(program, ctx)
    reordered, _ = Overlap()(program, ctx)
    verify_spec(reordered, ctx)
    assert reordered.stage is Stage.ORDERED
    assert equal(run(reordered, ctx), run(program, ctx))


@pytest.fixture
def tp_group():
    """Create a group of one rank under the names of the axis' communicators, for Inductor to look up."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for communicator in ("tp", "tp:gradients"):
        register_axis_group(communicator, dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.full
def test_inductor_keeps_products_beside_collectives(tp_group, caplog):
    """Check that Inductor does not move a wait to the first operator of the fused kernel that needs it."""
    model = ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    cfg = Config(model=model, train=TrainConfig(seq_len=64, global_batch_size=4), mesh=MeshConfig(dp_shard=1, tp=2))
    program, ctx = compile_dry(resolve_auto(cfg, on_gpu=False), None).programs["step"]
    torch._logging.set_logs(output_code=True)
    try:
        with caplog.at_level(logging.DEBUG, "torch._inductor.graph.__output_code"):
            lower_inductor(program, ctx)
    finally:
        torch._logging.set_logs()
    code = "\n".join(dict.fromkeys(record.getMessage() for record in caplog.records))  # two handlers may get a record
    hidden, products, starts = 0, 0, {}
    for line in code.splitlines():
        buffer = re.search(r"buf\d+", line)
        if "_c10d_functional.wait_tensor.default(" in line:
            hidden += products > starts.pop(buffer[0], products)
        elif "torch.ops._c10d_functional." in line and "assert" not in line:
            starts[buffer[0]] = products
        products += bool(re.search(r"extern_kernels\.\w*mm\(|= torch.ops.aten._scaled_dot_product", line))
    assert hidden == len(last_matmuls(program.graph, matmuls_of(program.graph))) > 0
