"""Passes after `joint` keep returned and stored values; `verify=spec` detects a planted fault in each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joint_programs import joint
from pipelines import pipeline_of
from small_programs import Small, cut
from torch import fx

from passes.autograd import simplify
from passes.autograd.simplify import Simplify
from passes.check.runner import run_passes
from passes.check.values import Numbers, check_kept, index_at
from passes.check.verify import check_in_flight
from passes.communication import bucket, cse, overlap, reassociate
from passes.communication.bucket import Bucket
from passes.communication.communicators import Communicators
from passes.communication.cse import CSE
from passes.communication.overlap import Overlap
from passes.communication.reassociate import Reassociate
from passes.ir import ir
from passes.ir.bodies import base_of
from passes.ir.operators import kind_of
from passes.ir.stages import Stage
from passes.memory import recompute
from passes.memory.remat import Remat
from passes.ops import reshard
from passes.sharding.collectives import Collectives
from passes.torch_private import c10d
from passes.trace.abstract_eval import abstract_eval
from passes.update import optimize
from passes.update.optimize import Optimize
from passes.update.optimizers import AdamW

aten = torch.ops.aten
ADD, MUL, F64 = aten.add.Tensor, aten.mul.Tensor, torch.float64
WAIT = c10d.wait_tensor.default
MESH = (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))
PASSES = (Simplify(), CSE(), Reassociate(), Remat("full"), Optimize(AdamW(), 1.0), Bucket(), Collectives(), Communicators(), Overlap())


def run(*passes: ir.Pass, mesh: Any = MESH) -> ir.Program:
    """Return the joint program of a small model after passes, each verified."""
    program, ctx = joint(mesh)
    return run_passes("step", passes, program, ctx)[0]


def refused(*passes: ir.Pass, mesh: Any = MESH) -> str:
    with pytest.raises(ir.CompileError) as error:
        run(*passes, mesh=mesh)
    return str(error.value).splitlines()[0]


KEEPING = (None, Stage.BUCKETED, Stage.ORDERED)  # stages that a pass can give and compute the same


def test_right_passes_are_heard_of_by_nothing():
    run(*PASSES)


def test_every_pass_that_leaves_a_joint_program_at_its_stage_keeps_values():
    steps = pipeline_of()["step"].passes
    joint = [step for step in steps if min(step.takes) >= Stage.JOINT and step.gives in KEEPING]
    assert all(step.keeps for step in joint) and len(joint) == 7


# ---- one fault a pass, each in what the pass calls ---------------------------------------------------


def planted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: Any, *passes: ir.Pass) -> str:
    monkeypatch.setattr(module, name, fault)
    return refused(*passes)


def test_simplify_that_loses_a_scale(monkeypatch):
    text = planted(monkeypatch, simplify, "same_operand", lambda node: node.args[0] if node.target is MUL else None, Simplify())
    assert re.match("simplify: .* makes another value of '(gradient|loss)'", text)


def test_simplify_that_drops_a_product_by_a_sum_over_ranks():
    """The factor is no separate scale any more, but still a factor in the numbers."""
    small = Small(tp=2)
    x = small.input("x", cut((4,), tp=0), "batch")
    term = small.call(MUL, small.call(aten.sum.default, x), 0.5)
    right = small.program([("loss", "loss", small.call(reshard.psum, term, "tp", F64, None), cut(()))], Stage.JOINT)
    assert not difference(right, moved(right, outwards=True), small.ctx)
    assert "makes another value of 'loss' 'loss'" in difference(right, moved(right, outwards=False), small.ctx)


def moved(program: ir.Program, outwards: bool) -> ir.Program:
    """Move the factor out of the sum over ranks, or lose it there."""
    program = program.copy()
    scale, reduced = (next(n for n in program.calls() if n.target is t) for t in (MUL, reshard.psum))
    scale.replace_all_uses_with(scale.args[0])
    if outwards:
        with program.graph.inserting_after(reduced):
            again = program.graph.call_function(MUL, (reduced, 0.5))
        ir.set_record(again, ir.record(reduced))
        program.graph.output_node().args = ((again,),)
    program.graph.eliminate_dead_code()
    return program


def difference(before: ir.Program, after: ir.Program, ctx: ir.Context) -> str:
    numbers = [Numbers(program, abstract_eval(program, ctx)) for program in (before, after)]
    return "; ".join(message for _, message in check_kept(*numbers))


def test_a_dim_that_differs_by_minus_one_and_minus_two():
    """Python's hash is the same for both."""
    small = Small()
    x = small.input("x", cut((4, 4)), "batch")
    total = small.call(aten.sum.dim_IntList, x, [-1])
    last = small.program([("metric", "m", total, cut((4,)))], Stage.JOINT)
    first = last.copy()
    (node,) = first.calls()
    node.args = (node.args[0], [-2])
    assert hash((int, -1)) == hash((int, -2))
    assert not difference(last, last, small.ctx)
    assert "makes another value of 'metric' 'm'" in difference(last, first, small.ctx)


def test_cse_that_ignores_other_arguments(monkeypatch):
    small = Small()
    x = small.input("x", cut((4,)), "batch")
    scaled = [small.call(MUL, x, number) for number in (2.0, 3.0, 2.0)]
    total = small.call(ADD, scaled[2], small.call(ADD, *scaled[:2]))
    right = small.program([("metric", "m", total, cut((4,)))], Stage.JOINT)
    assert not difference(right, CSE()(right, small.ctx)[0], small.ctx)
    monkeypatch.setattr(cse, "signature", lambda tree: tuple(n for n in tree if isinstance(n, fx.Node)))
    assert "makes another value of 'metric' 'm'" in difference(right, CSE()(right, small.ctx)[0], small.ctx)


def test_cse_that_draws_once():
    small = Small()
    x = small.input("x", cut((4,)), "batch")
    drawn = [small.call(aten.bernoulli.p, x, 0.5) for _ in range(2)]
    right = small.program([("metric", "m", small.call(aten.sub.Tensor, *drawn), cut((4,)))], Stage.JOINT)
    wrong = right.copy()
    first, second = (n for n in wrong.calls() if n.target is aten.bernoulli.p)
    second.replace_all_uses_with(first)
    assert not difference(right, right.copy(), small.ctx) and difference(right, wrong, small.ctx)


@pytest.mark.parametrize("other", ["tp", "dp_shard"])
def test_reassociation_over_different_axes(other):
    small = Small(tp=2, dp_shard=2)
    a, b = (small.input(name, cut((4,)), "batch") for name in "ab")
    sums = [small.call(reshard.psum, x, axis, F64, None) for x, axis in ((a, "tp"), (b, other))]
    right = small.program([("metric", "m", small.call(ADD, *sums), cut((4,)))], Stage.JOINT)
    wrong = right.copy()
    node = next(n for n in wrong.calls() if n.target is ADD)
    reassociate.reduce_sum(node, list(node.all_input_nodes), small.ctx)
    assert bool(difference(right, wrong, small.ctx)) == (other != "tp")


def test_remat_from_another_input(monkeypatch):
    def operand(node, user, clones):
        new = clone(node, user, clones)
        operands = [n for n in new.all_input_nodes if ir.is_tensor(n) and ir.is_tensor(node)]
        alike = [n for n in operands if simplify.lies_alike(n, node)]
        return alike[0] if alike else new

    clone = recompute.clone
    assert "makes another value of" in planted(monkeypatch, recompute, "clone", operand, Remat("full"))


@pytest.mark.parametrize(("times", "text"), [(0, "is a full copy on every rank of"), (2, "a value that is already a sum over them")])
def test_optimize_that_reduces_over_too_few_axes_or_twice(monkeypatch, times, text):
    right = optimize.reduce_gradient

    def wrong(append, name, gradient, axes, reduce_dtype):
        return right(append, name, gradient, list(axes) * times, reduce_dtype)

    assert text in planted(monkeypatch, optimize, "reduce_gradient", wrong, Optimize(AdamW(), 1.0))


def rolled(together: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bucket's tensors, each cut one entry too late."""
    return lambda xs, **options: [
        torch.cat([flat[1:], flat[:1]]).view(y.shape) for y in together(xs, **options) for flat in (y.reshape(-1),)
    ]


USED = [op for op in bucket.TOGETHER if op is not reshard.pmax]  # this model has no maxima


@pytest.mark.parametrize("op", USED, ids=lambda op: op._opname)
def test_schedule_that_cuts_buckets_wrongly(monkeypatch, op):
    monkeypatch.setitem(bucket.TOGETHER, op, rolled(bucket.TOGETHER[op]))
    assert "makes another value of" in refused(Remat("full"), Optimize(AdamW(), 1.0), Bucket())


def test_communicators_that_change_more_than_the_name():
    passes = (Optimize(AdamW(), 1.0), Bucket(), Collectives())
    program, ctx = run(*passes), joint(MESH)[1]
    wrong = Communicators()(program, ctx)[0].copy()
    node = next(n for n in wrong.calls() if str(n.args[-1]).endswith(":gradients"))
    node.update_arg(1, "max")
    assert "another value" in difference(program, wrong, ctx)


def test_overlap_that_waits_after_its_use(monkeypatch):
    monkeypatch.setattr(overlap, "after_waits", lambda program, tails: {n for n in program.calls() if n.target is WAIT})
    monkeypatch.setattr(overlap, "min", max, raising=False)
    assert re.match("overlap: .*was used before it has been defined", refused(*PASSES))


def test_overlap_that_waits_after_what_is_sent_is_overwritten():
    wrong = run(*PASSES[:-1]).copy()
    inputs = {n for n in wrong.graph.nodes if n.op == "placeholder"}
    start = next(n for n in wrong.calls() if kind_of(n) and base_of(n.args[0]) in inputs)
    wait = next(iter(start.users))
    write = next(n for n in wrong.calls() if n.target is aten.copy_.default and n.args[0] is base_of(start.args[0]))
    start.append(write)
    assert wait > write
    assert any("has overwritten it meanwhile" in message for _, message in check_in_flight(wrong))


def test_entries_that_share_memory_are_the_first_of_them():
    expanded = torch.empty(3, 1, 2).expand(3, 4, 2)
    assert index_at(3, tuple(expanded.shape), expanded.stride()) == [1, 0, 1]
