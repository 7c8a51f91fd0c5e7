"""The lockstep simulator: every collective against its definition, in every group of a two-axis mesh."""

from __future__ import annotations

import weakref

import pytest
import torch
from small_programs import Small, cut
from torch import Tensor

from passes.check.simulate import Lockstep, coordinate
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.record import Origin
from passes.ir.spec import Spec
from passes.torch_private import c10d

GROUPS = {"dp_shard": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}  # of ranks dp_shard * 2 + tp
VALUES = [torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64) * 10**rank for rank in range(4)]


def run(op, *args, mesh=(("dp_shard", 2), ("tp", 2)), values=VALUES) -> list[Tensor]:
    """Return every rank's value after a collective and its wait."""
    small = Small(**dict(mesh))
    x = small.input("x", cut(values[0].shape))
    out = small.call(c10d.wait_tensor.default, small.call(op, x, *args))
    spec = Spec.whole(tuple(ir.example(out).shape))
    return [out for (out,) in Lockstep(small.program([("metric", "out", out, spec)])).run([[v] for v in values])]


@pytest.mark.parametrize("axis", GROUPS)
@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (c10d.all_gather_into_tensor.default, (2,), lambda a, b: (torch.cat([a, b]), torch.cat([a, b]))),
        (c10d.all_reduce.default, ("sum",), lambda a, b: (a + b, a + b)),
        (c10d.all_reduce.default, ("max",), lambda a, b: (b, b)),
        (c10d.reduce_scatter_tensor.default, ("sum", 2), lambda a, b: ((a + b)[:1], (a + b)[1:])),
        (c10d.all_to_all_single.default, ([1, 1], [1, 1]),
         lambda a, b: (torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]]))),
    ],
    ids=["all_gather", "sum", "max", "reduce_scatter", "all_to_all"],
)
def test_each_group_exchanges_its_own_values(axis, op, args, expected):
    values_after = run(op, *args, axis)
    for low, high in GROUPS[axis]:
        for rank, value in zip((low, high), expected(VALUES[low], VALUES[high]), strict=True):
            assert torch.equal(values_after[rank], value)


def test_all_to_all_transposes_ranks_and_pieces():
    values = [torch.arange(3.0) + 10 * rank for rank in range(3)]
    values_after = run(c10d.all_to_all_single.default, [1, 1, 1], [1, 1, 1], "tp", mesh=(("tp", 3),), values=values)
    assert [h.tolist() for h in values_after] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_sums_run_in_rank_order():
    """1e16 - 1e16 + 1 is 1 only in this order; a fixed order makes runs reproducible."""
    values = [torch.tensor([x], dtype=torch.float64) for x in (1e16, -1e16, 1.0)]
    assert [h.item() for h in run(c10d.all_reduce.default, "sum", "tp", mesh=(("tp", 3),), values=values)] == [1, 1, 1]


def test_results_are_memory_of_their_own():
    small = Small(tp=2)
    x = small.input("x", cut((2,)))
    out = small.call(c10d.wait_tensor.default, small.call(c10d.all_reduce.default, x, "sum", "tp"))
    result = small.call(torch.ops.aten.add_.Tensor, out, small.axis_index("tp"))
    program = small.program([("metric", "out", result, cut((2,)))])
    inputs = [[torch.ones(2, dtype=torch.float64), torch.tensor(rank)] for rank in range(2)]
    assert [out.tolist() for (out,) in Lockstep(program).run(inputs)] == [[2, 2], [3, 3]]
    assert [values[0].tolist() for values in inputs] == [[1, 1], [1, 1]]


def test_an_operator_that_fails_is_named_with_its_line():
    small = Small(tp=2)
    x = small.input("x", cut((2,)))
    out = small.call(torch.ops.aten.mul.Tensor, x, x)
    ir.update(out, origin=Origin("model.py:12"))
    program = small.program([("metric", "out", out, cut((2,)))])
    out.target = torch.ops.aten.mm.default
    with pytest.raises(ir.CompileError, match=r"lockstep: %mul_tensor \(model.py:12\) RuntimeError: self must"):
        Lockstep(program).run([[torch.ones(2)], [torch.ones(2)]])


def test_a_collective_it_does_not_know_is_refused_by_name():
    with pytest.raises(ir.CompileError, match=r"%broadcast_default .*broadcast.default is not simulated"):
        run(c10d.broadcast.default, 0, "tp")


@pytest.mark.parametrize("how", ["product", "avg"])
def test_a_reduction_it_does_not_know_is_refused(how):
    with pytest.raises(ir.CompileError, match=f"reduction '{how}' is not simulated"):
        run(c10d.all_reduce.default, how, "tp")


def test_values_die_with_their_last_use():
    alive: list[weakref.ref] = []
    most = 0

    def double(x: Tensor) -> Tensor:
        nonlocal most
        out = x * 2
        alive.append(weakref.ref(out))
        most = max(most, sum(ref() is not None for ref in alive))
        return out

    small = Small(tp=2)
    node = small.input("x", cut((2,)))
    for _ in range(6):
        node = small.call(double, node)
    alive.clear()
    most = 0
    Lockstep(small.program([("metric", "out", node, cut((2,)))])).run([[torch.ones(2)], [torch.ones(2)]])
    assert len(alive) == 12
    assert most == 4  # on each of two ranks, one value and what is computed from it


def test_places_are_a_rank_s_coordinates():
    mesh = Mesh.of({"dp_shard": 2, "tp": 3})
    dp, tp = (ir.Input(axis, "coordinate", Spec(())) for axis in ("dp_shard", "tp"))
    assert [(coordinate(mesh, r, dp).item(), coordinate(mesh, r, tp).item()) for r in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert coordinate(mesh, 0, tp).shape == () and coordinate(mesh, 0, tp).dtype == torch.int64
