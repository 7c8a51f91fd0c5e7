"""Each operator of a placed program: the operand that stays, the reductions, and placements that are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from small_programs import Small, cut

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.ir.stages import Stage
from passes.sharding.propagate import propagate

aten = torch.ops.aten
ROWS, WIDE, NARROW = 6, 8, 4


def sequence(spec: Spec) -> Spec:
    """Return a placement whose first dim is a sequence."""
    return replace(spec, dims=((Factor(ROWS, spec.dims[0][0].axes, "sequence"),), *spec.dims[1:]))


class Placed:
    """A one-device program whose inputs have placements, and the decisions of propagation."""

    def __init__(self, mesh: dict[str, int], write, sequence_parallel: bool = True, **specs: tuple[str, Spec]):
        small = Small()
        inputs = {name: small.input(name, Spec.whole(spec.shape), kind) for name, (kind, spec) in specs.items()}
        results = write(small.call, **inputs)
        program = small.program(("metric", node.name, node, Spec.whole(tuple(ir.example(node).shape))) for node in results)
        placed_inputs = tuple(replace(i, spec=specs[i.name][1]) for i in program.inputs)
        program = replace(program, mesh=Mesh.of(mesh), inputs=placed_inputs, stage=Stage.CAPTURED)
        self.plan = propagate(program, sequence_parallel, small.ctx)
        self.nodes = {node.name: node for node in program.graph.nodes}

    def needed(self, name: str) -> list[str]:
        """Return the placements that an operator needs of its operands, as text."""
        return [str(spec) for spec in self.plan.decisions[self.nodes[name]].operands]

    def made(self, name: str) -> str:
        """Return the placement of a result before its reduction."""
        return str(self.plan.produced[self.nodes[name]])

    def reduced(self, name: str) -> str | None:
        """Return the placement to which a sum is reduced before use; None if it is not."""
        spec = self.plan.reduced.get(self.nodes[name])
        return spec and str(spec)


def linear(call, x, w):
    return [call(aten.linear.default, x, w)]


@pytest.mark.parametrize(("axis", "x", "w", "needed"), [
    ("dp_shard", {"dp_shard": 0}, {"dp_shard": 0}, ["[6@dp_shard, 4]", "[8, 4] replicate(dp_shard)"]),
    ("cp", {"cp": 0}, {"cp": 1}, ["[6@cp, 4]", "[8, 4] replicate(cp)"]),
    ("tp", {"tp": 0}, {"tp": 0}, ["[6, 4] replicate(tp)", "[8@tp, 4]"]),
    ("tp", {}, {"tp": 0}, ["[6, 4] replicate(tp)", "[8@tp, 4]"]),
    ("tp", {"tp": 1}, {}, ["[6, 4@tp]", "[8, 4@tp]"]),
])  # fmt: skip
def test_activations_stay_on_data_axes_and_weights_on_tp(axis, x, w, needed):
    specs = {"x": ("batch", cut((ROWS, NARROW), **x)), "w": ("parameter", cut((WIDE, NARROW), **w))}
    assert Placed({axis: 2}, linear, **specs).needed("linear_default") == needed


def test_weights_alone_stay_where_they_are_on_data_axes():
    """Values computed from parameters are sharded like them, so that one result is gathered, not each parameter."""

    def scaled(call, a, b):
        return [call(aten.mul.Tensor, a, b)]

    shards = ("parameter", cut((WIDE, NARROW), dp_shard=0))
    assert Placed({"dp_shard": 2}, scaled, a=shards, b=shards).needed("mul_tensor") == ["[8@dp_shard, 4]"] * 2


def twice(call, x, w, v):
    up = call(aten.linear.default, x, w)
    down = call(aten.linear.default, up, v)
    doubled = call(aten.mul.Scalar, down, 2.0)
    return [call(aten.square.default, doubled)]


MODEL = {
    "x": ("batch", sequence(cut((ROWS, NARROW)))),
    "w": ("parameter", cut((WIDE, NARROW), tp=0)),
    "v": ("parameter", cut((NARROW, WIDE), tp=1)),
}


@pytest.mark.parametrize(("sequence_parallel", "whole"), [(True, "[6@tp, 4]"), (False, "[6, 4]")])
def test_a_sum_is_carried_through_what_is_linear_and_reduced_before_what_is_not(sequence_parallel, whole):
    placed = Placed({"tp": 2}, twice, sequence_parallel, **MODEL)
    assert placed.made("linear_default_1") == placed.made("mul_scalar") == "[6, 4] sum(tp)"
    assert placed.reduced("linear_default_1") is None and placed.reduced("mul_scalar") == whole
    assert placed.needed("square_default") == [whole]


def test_a_sum_of_two_users_is_reduced_once_for_both():
    def used_twice(call, x, w, v):
        down = call(aten.linear.default, call(aten.linear.default, x, w), v)
        return [call(aten.mul.Scalar, down, 2.0), call(aten.mul.Scalar, down, 3.0)]

    placed = Placed({"tp": 2}, used_twice, **MODEL)
    assert placed.reduced("linear_default_1") == "[6@tp, 4]"
    assert placed.needed("mul_scalar") == placed.needed("mul_scalar_1") == ["[6@tp, 4]"]


@pytest.mark.parametrize("x", [{}, {"dp_shard": 0}, {"tp": 1}, {"dp_shard": 0, "tp": 1}, {"dp_shard": 1, "tp": 0}], ids=str)
@pytest.mark.parametrize("w", [{}, {"tp": 0}, {"tp": 1}, {"dp_shard": 0, "tp": 1}, {"dp_shard": 1, "tp": 1}], ids=str)
def test_an_axis_has_one_state_in_each_placement(x, w):
    specs = {"x": ("batch", cut((ROWS, NARROW), **x)), "w": ("parameter", cut((WIDE, NARROW), **w))}
    placed = Placed({"dp_shard": 2, "tp": 2}, linear, **specs)
    decision = placed.plan.decisions[placed.nodes["linear_default"]]
    for spec in (*decision.operands, *decision.results):
        states = Counter([*spec.sharded, *spec.partial_axes, *spec.replicate])
        assert all(count == 1 for count in states.values()), str(spec)
    rows, columns = (set(spec.dims[-1][0].axes) for spec in decision.operands)
    assert rows == columns, "both operands of a product hold the same shards of what is summed"
