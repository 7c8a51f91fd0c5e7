"""Communicators: which collectives share one, in what order, and that values stay the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from joint_programs import equal, joint, plain, run
from oracle import ADAMW, batches, compile_lockstep, llama, llama_loss
from small_programs import Small, cut
from sweeps import quick

from passes.check.verify import verify_spec
from passes.communication.bucket import Bucket
from passes.communication.communicators import Communicators
from passes.cost.accounting import Ledger, traffic_of
from passes.ir import ir
from passes.ir.operators import axis_of, communicator_of, kind_of
from passes.ir.printer import print_program
from passes.ir.stages import Stage
from passes.memory.remat import Remat
from passes.sharding.collectives import Collectives
from passes.torch_private import c10d
from passes.trace.abstract_eval import abstract_eval

F32 = torch.float32




def gathered(program: Small, name: str, axis: str):
    shard = program.input(name, cut((4, 4), **{axis: 0}), "parameter", F32)
    start = program.call(c10d.all_gather_into_tensor.default, shard, program.mesh[axis], axis)
    return program.call(c10d.wait_tensor.default, start)


def reduced(program: Small, x, axis: str, phase: str = "backward"):
    parts = program.mesh[axis]
    start = program.call(c10d.reduce_scatter_tensor.default, x, "sum", parts, axis, phase=phase)
    return program.call(c10d.wait_tensor.default, start, phase=phase)


def summed(program: Small, x, axis: str, phase: str):
    start = program.call(c10d.all_reduce.default, x, "sum", axis, phase=phase)
    return program.call(c10d.wait_tensor.default, start, phase=phase)


def named(program: Small, *results) -> list[str]:
    """Return the communicators of the collectives after the pass, in order."""
    outputs = [("gradient", f"g{i}", node, cut(tuple(ir.example(node).shape))) for i, node in enumerate(results)]
    before = program.program(outputs, Stage.EXPLICIT)
    text = print_program(before)
    after, _ = Communicators()(before, program.ctx)
    assert print_program(before) == text
    return [str(communicator_of(node)) for node in after.calls() if kind_of(node)]


def exchanged(program: Small, x, axis: str):
    sizes = [2] * program.mesh[axis]
    return program.call(c10d.wait_tensor.default, program.call(c10d.all_to_all_single.default, x, sizes, sizes, axis))


@pytest.mark.parametrize(("gathers", "names"), [
    (("ep",), ["ep", "ep:exchanges"]), (("cp",), ["cp", "ep"]), ((), ["ep"]),
])
def test_exchanges_do_not_queue_with_gathers(gathers, names):
    program = Small(ep=2, cp=2)
    weights = [gathered(program, f"w{i}", axis) for i, axis in enumerate(gathers)]
    rows = program.input("rows", cut((4, 4)), "batch", F32)
    assert named(program, *weights, exchanged(program, rows, "ep")) == names


@pytest.mark.parametrize(("is_alone", "name"), [(True, "tp"), (False, "tp:ring")])
def test_a_ring_does_not_queue_with_others_of_its_axis(is_alone, name):
    program = Small(tp=2)
    x = program.input("x", cut((4, 4)), "batch", F32)
    sent = program.call(torch.ops.ct.shift.default, x, "tp", 1)
    received = program.call(torch.ops.ct.arrive.default, sent, x)
    others = [] if is_alone else [gathered(program, "w", "tp")]
    assert name in named(program, received, *others)


def test_gradients_do_not_queue_with_gathers():
    program = Small(dp_shard=2)
    full = gathered(program, "w", "dp_shard")
    assert named(program, reduced(program, full, "dp_shard")) == ["dp_shard", "dp_shard:gradients"]


def test_an_axis_that_carries_gradients_alone_has_one_communicator():
    program = Small(dp_replicate=2)
    x = program.input("x", cut((4, 4)), "batch", F32)
    loss = summed(program, program.call(torch.ops.aten.sum.default, x), "dp_replicate", "forward")
    gradient = summed(program, x, "dp_replicate", "optimizer")
    norm = summed(program, program.call(torch.ops.aten.sum.default, gradient, phase="optimizer"), "dp_replicate", "optimizer")
    assert named(program, loss, gradient, norm) == ["dp_replicate"] * 3


def test_what_the_backward_goes_on_with_is_no_gradient_of_a_parameter():
    program = Small(tp=2)
    x, w = program.input("x", cut((4, 4)), "batch", F32), program.input("w", cut((4, 4)), "parameter", F32)
    activation = summed(program, x, "tp", "backward")
    last = program.call(torch.ops.aten.mm.default, activation, w, phase="backward")
    assert named(program, last, summed(program, last, "tp", "optimizer")) == ["tp", "tp:gradients"]


MESHES = [(("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2)), (("dp_shard", 2), ("tp", 2)), (("cp", 2), ("tp", 2)),
          (("dp_shard", 2), ("cp", 2))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_the_bits_stay_and_so_do_the_bytes_of_an_axis(mesh):
    program, ctx = joint(mesh)
    for step in (Remat("full"), Bucket(), Collectives()):
        program, _ = step(program, ctx)
    apart, report = Communicators()(program, ctx)
    verify_spec(apart, ctx)
    assert equal(run(apart, ctx), plain(mesh))
    assert traffic_of(Ledger(apart, abstract_eval(apart, ctx))) == traffic_of(Ledger(program, abstract_eval(program, ctx)))
    assert [axis_of(node) for node in apart.calls()] == [axis_of(node) for node in program.calls()]
    assert report.counts["apart"] > 0


@pytest.mark.parametrize(("mesh", "wanted"), quick([
    ({"dp_shard": 2}, ["dp_shard", "dp_shard:gradients"]),
    ({"dp_replicate": 2}, ["dp_replicate"]),
    ({"dp_replicate": 2, "dp_shard": 2}, ["dp_replicate", "dp_shard", "dp_shard:gradients"]),
    ({"cp": 2, "dp_shard": 2}, ["cp", "fsdp", "fsdp:gradients"]),
    ({"tp": 2}, ["tp", "tp:gradients"]),
], 2, 3), ids=str)
def test_a_step_has_as_many_communicators_as_it_needs(mesh, wanted):
    step = compile_lockstep(llama(2), llama_loss, batches(rows=4)[0], mesh, ADAMW)
    (program,) = (c.program for c in step.train.values())
    actual = Counter(communicator_of(node) for node in program.calls() if kind_of(node))
    assert sorted(actual) == wanted
    for node in program.calls():
        if kind_of(node) == "reduce_scatter" and axis_of(node) in ("dp_shard", "fsdp"):
            assert communicator_of(node) == f"{axis_of(node)}:gradients"
        if kind_of(node) == "all_gather" and axis_of(node) in ("dp_shard", "fsdp"):
            assert communicator_of(node) == axis_of(node)
