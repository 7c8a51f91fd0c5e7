"""Optimizer state in eight bits and stochastic rounding: torchao's numbers, the same on every mesh."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import compile_lockstep
from sweeps import in_turn
from torch import Tensor, nn
from torchao.optim import AdamW8bit, AdamWFp8
from torchao.optim.quant_utils import create_dynamic_map

from compiler_trainer import UserError
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.update.moments import QuantBlocks, block_spec, dynamic_map
from passes.update.update import round_at_random

THEIRS = {"adamw8bit": AdamW8bit, "adamwfp8": AdamWFp8}
MESHES = [{"dp_shard": 2}, {"dp_shard": 3}, {"tp": 2}, {"dp_shard": 2, "tp": 2}]
RATE = 1e-2


class Pair(nn.Module):
    """A model of two layers whose weights have blocks of 64, and a bias that is too small."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128, dtype=dtype), nn.Linear(128, 64, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def data(dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = [{k: torch.randn(6, 64, generator=generator) for k in ("x", "y")} for _ in range(4)]
    return [{"x": b["x"].to(dtype), "y": b["y"]} for b in batches]


def optim(name: str = "adamw", **options) -> dict:
    return {"name": name, "lr": RATE, "weight_decay": 0.1, "block": 64, **options}


def trained(mesh: dict[str, int], dtype: torch.dtype = torch.float32, **options):
    step = compile_lockstep(Pair(dtype), loss_fn, data(dtype)[0], mesh, optim(**options))
    for batch in data(dtype):
        step(batch)
    return step


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_of_a_code_are_those_of_torchao(signed):
    wanted = torch.tensor(create_dynamic_map(signed))
    torch.testing.assert_close(dynamic_map(signed, torch.device("cpu")), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", THEIRS)
def test_training_is_that_of_torchao(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)  # their update, run eagerly
    model = Pair()
    optimizer = THEIRS[name](model.parameters(), lr=RATE, weight_decay=0.1, block_size=64)
    for batch in data():
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    for key, value in trained({}, name=name).state_dict().items():
        change = RATE * 4
        assert (value - model.state_dict()[key]).abs().max() < 1e-3 * change, key


@pytest.mark.parametrize(("mesh", "name"), in_turn(MESHES, THEIRS), ids=str)
@pytest.mark.sample(2)
def test_every_mesh_trains_alike(name, mesh):
    full, parts = trained({}, name=name), trained(mesh, name=name)
    for key, value in full.state_dict().items():
        off = (parts.state_dict()[key] - value).abs()
        assert (off > 1e-5).float().mean() < 1e-3 and off.max() < RATE, key  # a sum in another order may take another code
    codes = parts.state["optim.exp_avg.up.weight"]
    assert all(x.itemsize == 1 for x in codes.local.values())
    scale = parts.state["optim.exp_avg.scale.up.weight"]
    assert scale.spec.shape == full.state["optim.exp_avg.scale.up.weight"].spec.shape == (128, 1)


def test_state_takes_a_quarter_of_fp32():
    def state_bytes(step):
        return sum(x.nbytes for name, s in step.state.items() if "weight" in name and "exp" in name for x in s.local.values())

    assert state_bytes(trained({}, name="adamw8bit")) == state_bytes(trained({})) / 4 * (1 + 4 / 64)


@pytest.mark.parametrize(("dim", "mesh", "wanted"), [
    ((Factor(512),), {}, (2,)),
    ((Factor(512, ("tp",)),), {"tp": 2}, (2,)),
    ((Factor(512, ("tp",)),), {"tp": 4}, None),  # 128 entries a rank
    ((Factor(6, ("tp",)), Factor(256)), {"tp": 4}, (6,)),
    ((Factor(8), Factor(64)), {}, (2,)),
    ((Factor(8, ("tp",)), Factor(64)), {"tp": 2}, (2,)),
    ((Factor(8, ("tp",)), Factor(64)), {"tp": 4}, None),
    ((Factor(300),), {}, None),
])
def test_blocks_lie_within_a_rank(dim, mesh, wanted):
    spec = block_spec(Spec(((Factor(3),), dim)), Mesh.of(mesh), 256)
    assert (spec and spec.shape[1:]) == wanted


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_coding_again_changes_nothing(name):
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    coder = QuantBlocks(256, name, signed=True)
    once = coder.decode(coder.encode(x))
    assert (once - x).abs().max() < x.abs().max() * 0.07
    zero = coder.decode([torch.zeros_like(part) for part in coder.encode(x)])
    assert torch.equal(zero.abs(), torch.zeros_like(x))


# ---- stochastic rounding ---------------------------------------------------------------------------


def test_rounding_keeps_the_mean_and_what_is_exact():
    index = torch.arange(20_000)
    x = torch.full((20_000,), 1 + 0.3 * 2**-7)
    rounded = torch.stack([round_at_random(x, torch.tensor(float(s)), 0, index) for s in range(20)]).double()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    assert ((rounded - 1) * 2**7).mean() == pytest.approx(0.3, abs=0.003)  # 4 standard deviations
    exact = torch.tensor([0.0, -1.5, 2.0**100, float("inf"), -float("inf")])
    assert torch.equal(round_at_random(exact, torch.tensor(1.0), 0, torch.arange(5)).float(), exact)


@pytest.mark.parametrize("mesh", MESHES[:2] + MESHES[3:], ids=str)
@pytest.mark.sample(2)
def test_rounding_draws_the_same_on_every_mesh(mesh):
    """Check that after one step from the same parameters only entries near a rounding boundary differ."""
    steps = [compile_lockstep(Pair(torch.bfloat16), loss_fn, data(torch.bfloat16)[0], m,
                              {"name": "sgd", "lr": 1e-3, "stochastic_rounding": True}) for m in ({}, mesh)]
    for step in steps:
        step(data(torch.bfloat16)[0])
    for name, value in steps[0].state_dict().items():
        same = (steps[1].state_dict()[name] == value).float().mean()
        assert value.dtype == torch.bfloat16 and same > 0.97, (name, same)


def test_small_updates_are_not_lost():
    """Apply updates of a hundredth of the last bit, which rounding to nearest would always lose."""

    def distance(stochastic: bool) -> float:
        step = compile_lockstep(Pair(torch.bfloat16), loss_fn, data(torch.bfloat16)[0], {},
                                {"name": "sgd", "lr": 1e-4, "stochastic_rounding": stochastic})
        before = {name: value.clone() for name, value in step.state_dict().items()}
        for _ in range(4):
            for batch in data(torch.bfloat16):
                step(batch)
        after = step.state_dict()
        return float((after["down.weight"] != before["down.weight"]).float().mean())

    assert distance(True) > 3 * distance(False)


@pytest.mark.parametrize(("options", "message"), [
    ({"name": "adamw8bit", "block": 192}, "no parameter has rows of whole blocks of 192"),
    ({"stochastic_rounding": True}, "set train.dtype=bfloat16"),
    ({"state": "int4"}, "optim.state"),
    ({"name": "adamw4bit"}, "optim.name"),
])
def test_what_would_change_nothing_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        compile_lockstep(Pair(), loss_fn, data()[0], {}, optim(**options))
