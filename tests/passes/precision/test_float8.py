"""Matmuls in float8: torchao's own bits, the same on every mesh, and float8 on the wire."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from oracle import compile_lockstep, llama_loss, train_step
from sweeps import in_turn
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from versions import needs_scales_by_row

from compiler_trainer import UserError
from compiler_trainer.config.schema import ExpertsConfig, ModelConfig
from compiler_trainer.models import Llama
from passes.ir import ir
from passes.precision import float8
from passes.rules import contractions
from passes.sharding.partition import Partitioner

BF16 = torch.bfloat16
MESHES = [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 3}, {"dp_shard": 2, "tp": 2}]


class Pair(nn.Module):
    """A model of a column-parallel and a row-parallel layer."""

    def __init__(self, width: int = 48):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, width, bias=False), nn.Linear(width, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x.to(self.up.weight.dtype))))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{k: torch.randn(5, 7, 32, generator=generator) for k in ("x", "y")} for _ in range(3)]


@functools.cache
def compiled(mesh: tuple[tuple[str, int], ...], recipe: str | None, dtype: str | None = None):
    passes = {"cast": {"float8": recipe, "float8_head": recipe is not None, "param_dtype": dtype}}
    return compile_lockstep(Pair(), loss_fn, data()[0], dict(mesh), passes=passes)


@functools.cache
def metrics(mesh: tuple[tuple[str, int], ...], recipe: str | None) -> list[dict[str, float]]:
    return train_step(compiled(mesh, recipe), data())


def runs(recipe: str) -> None:
    """Skip the test if this PyTorch does not run a recipe."""
    if recipe == "rowwise":
        needs_scales_by_row()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_one_linear_layer_has_the_bits_of_torchao(recipe):
    runs(recipe)
    torch.manual_seed(1)
    layer = nn.Sequential(nn.Linear(64, 48, bias=False, dtype=BF16))
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    gradient = torch.randn(32, 48, dtype=BF16)
    w = layer[0].weight.detach().clone()
    theirs = convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
    y = theirs(x)
    y.backward(gradient)
    quantize = float8.RECIPES[recipe]
    (ours,) = float8.forward(quantize, x.detach(), w)
    gx, gw = float8.backward(quantize, x.detach(), w, ours, gradient)
    assert torch.equal(ours, y) and torch.equal(gx, x.grad) and torch.equal(gw, theirs[0].weight.grad)


@pytest.mark.parametrize(("mesh", "recipe"), in_turn(MESHES, ["rowwise", "tensorwise"]), ids=str)
@pytest.mark.sample(1)
def test_scales_are_those_of_one_device_on_every_mesh(mesh, recipe):
    runs(recipe)
    actual, wanted, exact = metrics(tuple(mesh.items()), recipe), metrics((), recipe), metrics((), None)
    for a, b, c in zip(actual, wanted, exact, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5 and abs(a["grad_norm"] - b["grad_norm"]) < 1e-5
        assert 1e-6 < abs(a["loss"] - c["loss"]) < 0.01


def sent(recipe: str | None, dtype: str | None, kind: str = "all_gather") -> int:
    step = compiled((("dp_shard", 2),), recipe, dtype)
    traffic = [p for p in step.report["passes"] if p["program"] == "step"][-1]["accounting"]["traffic"]
    return sum(t["sent_bytes"] for t in traffic if t["kind"] == kind)


@pytest.mark.full
def test_float8_travels():
    """Check that bf16 halves the bytes of fp32, and float8 those of bf16; rowwise adds one fp32 scale per row."""
    assert sent(None, "bfloat16") * 2 == sent(None, None)
    assert sent("tensorwise", "bfloat16") * 2 == sent(None, "bfloat16")
    weights = sent("tensorwise", "bfloat16")
    assert weights < sent("rowwise", "bfloat16") <= weights + 4 * (48 + 32)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_products_take_their_second_matrix_by_columns(mesh, monkeypatch):
    """Check the layout that kernels need; a transposed matrix would be row-major after a gather."""
    programs = []
    passes = {"cast": {"float8": "tensorwise"}}
    compile_lockstep(Pair(), loss_fn, data()[0], mesh, passes=passes, observe=lambda program, _: programs.append(program))
    products = [n for p in programs for n in p.calls() if "_scaled_mm" in str(n.target) and p.has_backward]
    assert products and all(ir.example(n.args[1]).stride(0) == 1 for n in products)
    monkeypatch.setattr(contractions, "multiply_float8", torch.ops.aten._scaled_mm.default)
    monkeypatch.setattr(Partitioner, "hoist", lambda self, node, wanted: None)
    with pytest.raises(ir.CompileError, match=r"joint: %_scaled_mm.* needs %.* in contiguous columns, not strides"):
        compile_lockstep(Pair(), loss_fn, data()[0], mesh, passes=passes)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_shares_of_any_size_are_padded_for_the_kernel(recipe, monkeypatch):
    """Check shares of 35 tokens and 24 columns, of which CUDA's kernel takes neither."""
    programs = []
    mesh, passes = {"dp_shard": 1, "tp": 2}, {"cast": {"float8": recipe}}
    compile_lockstep(Pair(), loss_fn, data()[0], mesh, passes=passes, observe=lambda program, _: programs.append(program))
    products = [n for p in programs for n in p.calls() if "_scaled_mm" in str(n.target) and p.has_backward]
    dims = [(*ir.example(n.args[0]).shape[1:], *ir.example(n.args[1]).shape) for n in products]
    assert dims and all(size % 16 == 0 for sizes in dims for size in sizes)
    monkeypatch.setattr(contractions, "pad_float8", lambda x, *multiples: x.contiguous())
    with pytest.raises(ir.CompileError, match="_scaled_mm.* needs inner dim and columns in multiples of 16, not"):
        compile_lockstep(Pair(), loss_fn, data()[0], mesh, passes=passes)


def test_scales_of_weights_are_reduced_in_one_collective_a_layer_and_phase():
    """Check that, tensorwise, `up` and `down` go together in the forward, and `down` alone in the backward."""
    passes = compiled((("dp_shard", 2),), "tensorwise").report["passes"]
    report = next(p["report"] for p in passes if p["name"] == "bucket" and p["program"] == "step")
    assert any("2 pmax as one, 8 bytes" in note for note in report["notes"]), report["notes"]


def refused(**cast) -> str:
    with pytest.raises(UserError) as caught:
        compile_lockstep(Pair(cast.pop("width", 48)), loss_fn, data()[0], {}, passes={"cast": cast})
    return str(caught.value)


def test_what_cannot_be_in_float8_is_said():
    assert "no linear layer is named like 'hed'" in refused(float8="rowwise", float8_skip=["hed"])
    assert "a dim under 64" in refused(float8="rowwise", float8_head=True, float8_min_size=64)
    assert "50 x 32 are not multiples of 16" in refused(float8="rowwise", float8_head=True, width=50)
    assert "'fp4' is not one of tensorwise, rowwise" in refused(float8="fp4")


def test_products_of_experts_are_left_and_reported():
    model = Llama(ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=64,
                              experts=ExpertsConfig(4, 2, 16)))
    batch = {key: torch.zeros(2, 16, dtype=torch.int64) for key in ("tokens", "positions", "labels")}
    step = compile_lockstep(model, llama_loss, batch, {}, passes={"cast": {"float8": "tensorwise"}})
    report = next(p["report"] for p in step.report["passes"] if p["name"] == "float8")
    assert "3 not: grouped matmuls of experts" in report["effects"][0]["detail"]


def test_layers_left_out_are_reported():
    cast = {"float8": "rowwise"}
    step = compile_lockstep(Pair(), loss_fn, data()[0], {}, passes={"cast": cast})
    report = next(p["report"] for p in step.report["passes"] if p["name"] == "float8")
    assert report["counts"] == {"linear": 1, "left": 1}
    (effect,) = report["effects"]
    assert str(ir.Effect(**effect)) == "passes.cast.float8: 1 of 2 linear layers in float8; 1 not: the head"
