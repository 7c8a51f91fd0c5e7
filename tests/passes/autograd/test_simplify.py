"""Simplification by algebra: the text before and after, the same bits, and operators that must stay."""

from __future__ import annotations

import pytest
import torch
from joint_programs import body, equal, joint, plain, run
from small_programs import Small, cut

from passes.autograd.simplify import Simplify
from passes.ir import ir

aten = torch.ops.aten
F32 = torch.float32


def simplified(small: Small, result) -> tuple[list[str], ir.Report]:
    """Return the operators left of a program that returns one value."""
    program = small.program([("loss", "loss", result, cut(tuple(ir.example(result).shape)))])
    after, report = Simplify()(program, small.ctx)
    return body(after).splitlines(), report


def test_the_gradient_of_a_mean_square_is_scaled_once_and_before_it_is_expanded():
    small = Small()
    x, s = small.input("x", cut((4, 8)), dtype=F32), small.input("s", cut((4, 1)), dtype=F32)
    spread = small.call(aten.div.Scalar, small.call(aten.expand.default, s, [4, 8]), 8)
    twice = small.call(aten.mul.Scalar, small.call(aten.pow.Tensor_Scalar, x, 1.0), 2.0)
    lines, report = simplified(small, small.call(aten.mul.Tensor, spread, twice))
    assert lines == [
        "%div_scalar_1 = div.Scalar(%s, 4.0)",
        "%expand_default_1 = expand(%div_scalar_1, [4, 8])",
        "%mul_tensor = mul.Tensor(%expand_default_1, %x)",
    ]
    assert report.counts == {"drop": 1, "join_scales": 1, "scale_before_expanding": 1}


@pytest.mark.parametrize(("target", "args", "again"), [
    (aten.neg.default, (), ()),
    (aten.t.default, (), ()),
    (aten.transpose.int, (0, 1), (-1, 0)),
])
def test_what_undoes_itself_goes(target, args, again):
    small = Small()
    x = small.input("x", cut((4, 8)), dtype=F32)
    twice = small.call(target, small.call(target, x, *args), *again)
    assert simplified(small, small.call(aten.exp.default, twice))[0] == ["%exp_default = exp(%x)"]


@pytest.mark.parametrize("plant", [
    lambda s, x: s.call(aten.pow.Tensor_Scalar, x, 2.0),
    lambda s, x: s.call(aten.mul.Scalar, x, 1.5),
    lambda s, x: s.call(aten._to_copy.default, x, dtype=torch.float64),
    lambda s, x: s.call(aten.transpose.int, s.call(aten.transpose.int, x, 0, 1), 1, 2),
    lambda s, x: s.call(aten.pow.Tensor_Scalar, s.call(aten.expand.default, s.call(aten.select.int, x, 0, 0), [2, 4, 4]), 1.0),
    lambda s, x: s.call(aten.mul.Tensor, s.call(aten.div.Scalar, x, 8), s.call(aten.mul.Scalar, x, 3.0)),
], ids=["square", "scale", "cast", "two transposes", "another layout", "no power of two"])
def test_what_computes_something_stays(plant):
    small = Small()
    result = plant(small, small.input("x", cut((4, 4, 4)), dtype=F32))
    before = len(list(small.program([("loss", "loss", result, cut(tuple(ir.example(result).shape)))]).calls()))
    assert len(simplified(small, result)[0]) == before


def test_a_model_keeps_its_bits_and_loses_lines():
    for mesh in ((), (("dp_shard", 2), ("tp", 2))):
        program, ctx = joint(mesh)
        after, report = Simplify()(program, ctx)
        assert equal(run(after, ctx), plain(mesh))
        assert report.counts["drop"] > 4 and len(list(after.calls())) < len(list(program.calls()))
