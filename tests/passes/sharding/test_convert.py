"""Conversions between any two placements keep the value; the gradient comes back dual, and padding is as recorded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from small_programs import Small, cut
from torch import Tensor

from passes.autograd.joint import Joint
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec, boxes, shard, unshard
from passes.sharding.collectives import Collectives
from passes.sharding.convert import convert

aten = torch.ops.aten
F64 = torch.float64
SHAPE = (5, 7)
GARBAGE = 77.0
ON_TP = ("invariant", "replicate", "sum", "rows", "columns")


def placed(tp: str, dp: str = "invariant") -> Spec:
    """Return a spec with a state on each of two axes, and unknown padding."""
    dims = {axis: ("rows", "columns").index(state) for axis, state in (("dp_shard", dp), ("tp", tp)) if state in ("rows", "columns")}
    states = (("dp_shard", dp), ("tp", tp))
    return replace(
        cut(SHAPE, **dims), fill=None, partial=tuple((axis, "sum") for axis, state in states if state == "sum"),
        replicate=tuple(axis for axis, state in states if state == "replicate"),
    )  # fmt: skip


def parts(spec: Spec, mesh: Mesh) -> list[Tensor]:
    """Draw local tensors for every rank, terms on partial axes, with garbage as padding."""
    terms = {at: torch.randn(SHAPE, dtype=F64) for at in itertools.product(*(range(mesh[a]) for a in spec.partial_axes))}
    full = replace(spec, fill=GARBAGE)
    return [shard(terms[tuple(rank[a] for a in spec.partial_axes)], full, mesh, rank) for rank in mesh]


def assert_held(locals_by_rank: list[Tensor], spec: Spec, mesh: Mesh, value: Tensor, fill: float | None) -> None:
    """Check that the ranks together hold the value, each its part unless it is a sum, and that padding is as recorded."""
    torch.testing.assert_close(unshard(locals_by_rank, spec, mesh), value, rtol=0, atol=1e-12)
    for rank, local in zip(mesh, locals_by_rank, strict=True):
        padding = torch.ones_like(local, dtype=torch.bool)
        for box in boxes(spec, mesh, rank):
            box.of_local(padding).fill_(False)
            assert spec.partial or torch.equal(box.of_local(local), box.of(unshard(locals_by_rank, spec, mesh)))
        assert fill is None or (local[padding] == fill).all()


@pytest.mark.sample(30)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp_shard": 2, "tp": 3}], ids=str)
@pytest.mark.parametrize(("dp", "then"), [("invariant", "invariant"), ("rows", "rows"), ("rows", "replicate"), ("replicate", "rows")])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(ON_TP, 2)))
def test_a_value_and_its_gradient(axes, dp, then, before, after):
    torch.manual_seed(0)
    small = Small(**axes)
    dp, then = (dp, then) if "dp_shard" in axes else ("invariant", "invariant")
    start, end = placed(before, dp), placed(after, then)
    x, y = small.input("x", start), small.input("y", end.gradient(), "batch")
    small.builder.coordinates = {axis: small.axis_index(axis) for axis in small.mesh.names}
    out = convert(small.builder, x, start, end, True, None)
    for node in small.builder.graph.nodes:
        ir.update(node, phase="forward", layer=None)
    fill = ir.spec(out).fill
    loss = small.call(aten.sum.default, small.call(aten.mul.Tensor, out, y))
    program = small.program([("loss", "loss", loss, Spec(())), ("metric", "out", out, end)])
    for rewrite in (Joint(), Collectives()):
        program, _ = rewrite(program, small.ctx)
    xs, ys = parts(start, small.mesh), parts(end.gradient(), small.mesh)
    ys = [torch.where(y == GARBAGE, 0, y) for y in ys]
    inputs = [[*pair, *map(torch.tensor, rank.values())] for *pair, rank in zip(xs, ys, small.mesh, strict=True)]
    _, outs, gradients = map(list, zip(*Lockstep(program).run(inputs), strict=True))
    assert_held(outs, end, small.mesh, unshard(xs, start, small.mesh), fill)
    assert_held(gradients, start.gradient(), small.mesh, unshard(ys, end.gradient(), small.mesh), None)
