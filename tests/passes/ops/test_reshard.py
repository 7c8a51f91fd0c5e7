"""Reshard operators by value: each keeps the logical value, and its gradient the logical gradient."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from small_programs import Small, cut
from torch import Tensor

from passes.autograd.joint import Joint
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec, boxes, shard, unshard
from passes.ops import reshard
from passes.sharding.collectives import Collectives

F64 = torch.float64


class Case(NamedTuple):
    """The states an operator takes and gives on `tp`; its arguments after x, from (axis_index, axis_size, size of dim 1)."""

    takes: str
    gives: str
    args: Callable[..., tuple]


# "shard" is of dim 1, "shard0" of dim 0
CASES = {
    reshard.all_gather: Case("shard", "replicate", lambda i, p, n: (1, "tp", p, n, F64, None)),
    reshard.reduce_scatter: Case("sum", "shard", lambda i, p, n: (1, "tp", p, F64, None)),
    reshard.psum: Case("sum", "invariant", lambda i, p, n: ("tp", F64, None)),
    reshard.invariant_to_replicate: Case("invariant", "replicate", lambda i, p, n: ("tp", None)),
    reshard.invariant_to_shard: Case("invariant", "shard", lambda i, p, n: (i, 1, "tp", p)),
    reshard.all_gather_invariant: Case("shard", "invariant", lambda i, p, n: (i, 1, "tp", p, n)),
    reshard.replicate_to_shard: Case("replicate", "shard", lambda i, p, n: (i, 1, "tp", p)),
    reshard.shard_to_partial: Case("shard", "sum", lambda i, p, n: (i, 1, "tp", p, n)),
    reshard.replicate_to_invariant: Case("replicate", "invariant", lambda i, p, n: (i, "tp")),
    reshard.invariant_to_partial: Case("invariant", "sum", lambda i, p, n: (i, "tp")),
    reshard.all_to_all: Case("shard", "shard0", lambda i, p, n: (0, 1, n, "tp", p)),
    reshard.pmax: Case("max", "invariant", lambda i, p, n: ("tp",)),
}
MESHES = [{"tp": 2}, {"tp": 3}, {"tp": 4}]
SHAPES = [(12, 12, 2), (5, 7, 1), (3, 2, 2)]  # divisible, uneven, fewer entries than ranks
SETTINGS = [*itertools.product(MESHES, SHAPES), ({"tp": 2, "dp_shard": 2}, (5, 7, 1))]


def placed(shape: tuple[int, ...], state: str) -> Spec:
    """Return a tensor in a state on `tp`, otherwise full; its padding holds garbage."""
    whole = replace(cut(shape), fill=77.0)
    if state.startswith("shard"):
        return replace(cut(shape, tp=0 if state == "shard0" else 1), fill=77.0)
    if state in ("replicate", "invariant"):
        return replace(whole, replicate=("tp",) if state == "replicate" else ())
    return replace(whole, partial=(("tp", state),))


def draw(spec: Spec, mesh: Mesh) -> list[Tensor]:
    """Draw local tensors for every rank: terms on partial axes, copies elsewhere."""
    indices = itertools.product(*(range(mesh[axis]) for axis in spec.partial_axes))
    terms = {at: torch.randn(spec.shape, dtype=F64) for at in indices}
    return [shard(terms[tuple(rank[a] for a in spec.partial_axes)], spec, mesh, rank) for rank in mesh]


def apply(op, shape: tuple[int, ...], mesh: dict[str, int]):
    """Return (specs of x and of the result, x, result, cotangent, gradient), values by rank; pmax has no gradient."""
    case, small = CASES[op], Small(**mesh)
    before, after = placed(shape, case.takes), placed(shape, case.gives)
    with_gradient = reshard.RESHARD_OPS[op].gradient is not None
    x = small.input("x", before, "parameter" if with_gradient else "batch")
    y = small.input("y", after.gradient(), "batch")
    out = small.call(op, x, *case.args(small.axis_index("tp"), small.mesh["tp"], shape[1]), spec=after)
    loss = small.call(torch.ops.aten.sum.default, small.call(torch.ops.aten.mul.Tensor, out, y))
    program = small.program([("loss", "loss", loss, Spec(())), ("metric", "out", out, after)])
    for rewrite in (Joint(), Collectives()) if with_gradient else (Collectives(),):
        program, _ = rewrite(program, small.ctx)
    xs, ys = draw(before, small.mesh), draw(after.gradient(), small.mesh)
    inputs = [[*pair, torch.tensor(rank["tp"])] for *pair, rank in zip(xs, ys, small.mesh, strict=True)]
    results = list(zip(*Lockstep(program).run(inputs), strict=True))
    return (before, after), xs, list(results[1]), ys, list(results[2]) if with_gradient else None


def assert_value(locals_by_rank: list[Tensor], spec: Spec, mesh: Mesh, value: Tensor) -> None:
    """Check that the ranks together hold the value; if it is not a sum, each one its part."""
    torch.testing.assert_close(unshard(locals_by_rank, spec, mesh), value, rtol=0, atol=1e-12)
    for rank, local in zip(mesh, locals_by_rank, strict=True):
        assert tuple(local.shape) == spec.local_shape(mesh)
        for box in boxes(spec, mesh, rank) if not spec.partial else ():
            torch.testing.assert_close(box.of_local(local), box.of(value), rtol=0, atol=1e-12)


def inner(a: list[Tensor], b: list[Tensor], spec: Spec, mesh: Mesh) -> float:
    """Return <a, b> of dually placed values: all ranks' terms, but only one rank's of equal copies."""
    counted = [rank for rank in mesh if all(rank[axis] == 0 for axis in mesh.axes if spec.state(axis) == "invariant")]
    return sum(float((box.of_local(x) * box.of_local(y)).sum()) for rank, x, y in zip(mesh, a, b, strict=True)
               for box in boxes(spec, mesh, rank) if rank in counted)


def test_every_operator_is_covered():
    assert set(CASES) == set(reshard.RESHARD_OPS)


def test_the_table_of_the_docs_says_what_the_records_say():
    rows = re.findall(r"^\| `(\w+)` \| (.*) -> (.*) \| (.*) \|$", reshard.__doc__, re.M)
    names = {"Shard": "shard", "Partial": "partial", "Partial max": "partial", "Invariant": "invariant",
             "Replicate": "replicate", "Shard of another dim": "shard"}  # fmt: skip
    documented = {name: (names[takes], names[gives]) for name, takes, gives, _ in rows}
    assert documented == {r.name: (r.takes[0], r.gives) for r in reshard.RESHARD_OPS.values()}
    assert {name for name, *_, gradient in rows if gradient.startswith("none")} == {
        r.name for r in reshard.RESHARD_OPS.values() if r.gradient is None}  # fmt: skip


@pytest.mark.parametrize("op", CASES, ids=lambda op: op._opname)
@pytest.mark.parametrize(("mesh", "shape"), SETTINGS, ids=str)
def test_value_gradient_and_adjointness(op, mesh, shape):
    torch.manual_seed(0)
    (before, after), xs, outs, ys, gradients = apply(op, shape, mesh)
    ranks = Mesh.of(mesh)
    assert_value(outs, after, ranks, unshard(xs, before, ranks))
    if gradients is not None:
        assert_value(gradients, before.gradient(), ranks, unshard(ys, after.gradient(), ranks))
        assert inner(outs, ys, after, ranks) == pytest.approx(inner(xs, gradients, before, ranks), abs=1e-10)


def test_a_bf16_gather_reduces_its_gradient_in_fp32():
    small = Small(dp_shard=2)
    x = small.input("x", cut((4,), dp_shard=0), dtype=torch.float32)
    y = small.input("y", replace(cut((4,)), partial=(("dp_shard", "sum"),)), "batch", torch.bfloat16)
    full = small.call(reshard.all_gather, x, 0, "dp_shard", 2, 4, torch.bfloat16, torch.float32)
    loss = small.call(torch.ops.aten.sum.default, small.call(torch.ops.aten.mul.Tensor, full, y))
    program = small.program([("loss", "loss", loss, Spec(())), ("metric", "full", full, cut((4,)))])
    for rewrite in (Joint(), Collectives()):
        program, _ = rewrite(program, small.ctx)
    terms = [torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2.0**-9, dtype=torch.bfloat16)]
    values = torch.tensor([1 / 3, 1.0, 2.0, 3.0]).chunk(2)
    outs = Lockstep(program).run(list(zip(values, terms, strict=True)))
    for _, gathered, gradient in outs:
        assert torch.equal(gathered, torch.cat(values).to(torch.bfloat16))
        assert torch.equal(gradient, torch.full((2,), 1 + 2.0**-9))  # bf16 would round it to 1


@pytest.mark.parametrize("op", [op for op in CASES if reshard.RESHARD_OPS[op].gradient is not None], ids=lambda op: op._opname)
def test_what_autograd_derives_are_boundary_operators_again(op):
    """The backward of every operator is its partner, so the gradient's communication can be read in the graph."""
    partners = {
        "all_gather": ["reduce_scatter"], "reduce_scatter": ["all_gather"], "psum": [], "invariant_to_replicate": ["psum"],
        "invariant_to_shard": ["all_gather_invariant"], "all_gather_invariant": ["invariant_to_shard"], "replicate_to_shard": ["shard_to_partial"], "shard_to_partial": ["replicate_to_shard"],
        "replicate_to_invariant": ["invariant_to_partial"], "invariant_to_partial": [], "all_to_all": ["all_to_all"],
    }
    case, small = CASES[op], Small(tp=2)
    after = placed((4, 4), case.gives)
    x, y = small.input("x", placed((4, 4), case.takes)), small.input("y", after, "batch")
    out = small.call(op, x, *case.args(small.axis_index("tp"), 2, 4))
    loss = small.call(torch.ops.aten.sum.default, small.call(torch.ops.aten.mul.Tensor, out, y))
    joint, _ = Joint()(small.program([("loss", "loss", loss, Spec(()))]), small.ctx)
    backward = [n.target for n in joint.calls() if ir.phase(n) == "backward"]
    assert [target._opname for target in backward if target in reshard.RESHARD_OPS] == partners[op._opname]
