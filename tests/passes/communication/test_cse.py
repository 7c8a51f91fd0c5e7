"""Repeated computations, collectives and reductions happen once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from joint_programs import Tiny, body, equal, joint, plain, run, run_on

from compiler_trainer.config.schema import CastConfig, Config, MeshConfig, ModelConfig, PassesConfig, TrainConfig
from compiler_trainer.planning.dry import compile_dry
from passes.check.verify import verify_spec
from passes.communication.cse import CSE
from passes.communication.reassociate import Reassociate
from passes.ir import ir
from passes.ir.operators import kind_of
from passes.ir.printer import print_program
from passes.ir.spec import Factor, Spec
from passes.ops import reshard

aten = torch.ops.aten
F32 = torch.float32
SHARDED = Spec(((Factor(4, ("tp",)),), (Factor(6, ()),)))
MESHES = [(("dp_shard", 2), ("tp", 2)), (("dp_replicate", 2),), (("cp", 2),)]


def gathered(tiny: Tiny, x, module: str = "layers.0.wq", phase: str = "forward"):
    """Return an all-gather of a value computed from x."""
    half = tiny.call(aten.mul.Tensor, x, 0.5, phase=phase, module=module)
    return tiny.call(reshard.all_gather, half, 0, "tp", 2, 4, F32, None, phase=phase, module=module)


# ---- once --------------------------------------------------------------------------------------------


def test_projections_of_one_activation_gather_it_once():
    tiny = Tiny(tp=2)
    x = tiny.input("x", SHARDED, "batch")
    q, k = (tiny.call(op, gathered(tiny, x, f"layers.0.{name}"), module=f"layers.0.{name}")
            for op, name in ((aten.neg.default, "wq"), (aten.abs.default, "wk")))
    tiny.call(aten.neg.default, x, module="layers.1.wq")  # there are two layers
    program = tiny.program(q, k)
    once, report = CSE()(program, tiny.ctx)
    assert report.counts == {"mul.Tensor": 1, "all_gather": 1}
    assert report.notes == ("%all_gather_1 (): travels once, as %all_gather",)
    values = {"x": torch.randn(4, 6)}
    assert equal(run_on(once, tiny.ctx, values), run_on(program, tiny.ctx, values))


@pytest.mark.parametrize("where", [{"module": "layers.1.wq"}, {"phase": "backward"}], ids=str)
def test_nothing_is_shared_across_layers_and_phases(where):
    tiny = Tiny(tp=2)
    x = tiny.input("x", SHARDED, "batch")
    program = tiny.program(gathered(tiny, x), gathered(tiny, x, **where), tiny.call(aten.neg.default, x, module="layers.1"))
    once, report = CSE()(program, tiny.ctx)
    assert not report.counts and body(once) == body(program)


def test_numbers_of_other_types_are_other_numbers_and_random_ones_are_new():
    tiny = Tiny()
    x = tiny.input("x", Spec.whole((3,)), "batch")
    scaled = [tiny.call(aten.mul.Tensor, x, by) for by in (1, 1.0, True, 1.0)]
    random = [tiny.call(aten.rand_like.default, x) for _ in range(2)]
    _, report = CSE()(tiny.program(*scaled, *random), tiny.ctx)
    assert report.counts == {"mul.Tensor": 1}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_a_model_keeps_its_bits(mesh):
    program, ctx = joint(mesh)
    text = print_program(program)
    once, _ = CSE()(program, ctx)
    verify_spec(once, ctx)
    assert print_program(program) == text
    assert equal(run(once, ctx), plain(mesh))


# ---- sums --------------------------------------------------------------------------------------------


def reduced(tiny: Tiny, x, *options):
    return tiny.call(reshard.reduce_scatter, x, *(options or (0, "tp", 2, F32, None)), phase="backward")


def test_three_partial_sums_are_reduced_once():
    tiny = Tiny(tp=2)
    x = tiny.input("x", Spec.whole((4, 6)), "batch")
    a, b, c = (tiny.call(op, x, phase="backward") for op in (aten.exp.default, aten.sin.default, aten.cos.default))
    two = tiny.call(aten.add.Tensor, reduced(tiny, a), reduced(tiny, b), phase="backward")
    program = tiny.program(tiny.call(aten.add.Tensor, two, reduced(tiny, c), phase="backward"))
    late, report = Reassociate()(program, tiny.ctx)
    assert report.counts == {"reduce_scatter": 2}
    assert [node.target._opname for node in late.calls()] == ["exp", "sin", "cos", "add", "add", "reduce_scatter"]
    values = {"x": torch.randn(4, 6)}
    for mine, plainly in zip(run_on(late, tiny.ctx, values), run_on(program, tiny.ctx, values), strict=True):
        torch.testing.assert_close(mine, plainly)


def test_other_options_other_uses_and_other_shapes_stay():
    tiny = Tiny(tp=2)
    x, row = tiny.input("x", Spec.whole((4, 6)), "batch"), tiny.input("row", Spec.whole((6,)), "batch")
    a, b = (tiny.call(op, x, phase="backward") for op in (aten.exp.default, aten.sin.default))
    reduce_dtype = tiny.call(aten.add.Tensor, reduced(tiny, a), reduced(tiny, b, 0, "tp", 2, F32, torch.bfloat16))
    used = reduced(tiny, a)
    twice = tiny.call(aten.add.Tensor, used, reduced(tiny, b))
    wide = tiny.call(aten.add.Tensor, tiny.call(reshard.psum, x, "tp", F32, None), tiny.call(reshard.psum, row, "tp", F32, None))
    same = tiny.call(aten.add.Tensor, used, used)
    scaled = tiny.call(aten.add.Tensor, reduced(tiny, a), reduced(tiny, b), alpha=2)
    program = tiny.program(reduce_dtype, twice, wide, same, scaled)
    late, report = Reassociate()(program, tiny.ctx)
    assert not report.counts and body(late) == body(program)


# ---- what it is for ----------------------------------------------------------------------------------


@pytest.mark.full
def test_float8_layers_send_activations_as_often_as_others():
    """Check float8 layers, each a function with its own gathers and reductions."""
    cfg = Config(
        model=ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128),
        train=TrainConfig(seq_len=32, global_batch_size=4),
        mesh=MeshConfig(dp_shard=1, tp=2),
    )

    def sent(float8):
        cast = CastConfig(param_dtype="bfloat16", float8=float8, float8_min_size=16)
        program, _ = compile_dry(replace(cfg, passes=PassesConfig(cast=cast)), None).programs["step"]
        return Counter(kind_of(n) for n in program.calls() if kind_of(n) and ir.example(n).dim() == 3)

    again = 2 * 2  # the two inputs of a layer, which the backward quantizes along the other dim
    assert sent("tensorwise") == sent(None) + Counter(all_gather=again)
