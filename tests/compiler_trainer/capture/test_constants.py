"""Tensors of a model that are neither parameter nor buffer, or come from Python numbers."""

from __future__ import annotations

import pytest
import torch
from oracle import LRS, NO_DECAY, compile_lockstep, trained_alike
from torch import nn

from compiler_trainer import UserError

MESHES = [{}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "dp_shard": 2}]
WEIGHTS = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)


class Attending(nn.Module):
    """Attention written out, with a mask and scales that are plain attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.scale, self.two = torch.rand(6, dtype=torch.float64), torch.tensor(2.0)
        self.mask = torch.ones(5, 5, dtype=torch.bool).tril()

    def forward(self, x):
        y = self.a(x) * self.scale * self.two + torch.tensor([0.1] * 6, dtype=x.dtype)
        return self.b((y @ y.mT).masked_fill(~self.mask, -torch.inf).softmax(-1) @ y)


class Layer(nn.Module):
    """A linear layer times a constant."""

    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 6).double(), torch.full((6,), factor, dtype=torch.float64)

    def forward(self, x):
        return x + self.linear(x) * self.factor + torch.tensor([0.1] * 6, dtype=x.dtype)


class Deep(nn.Module):
    """Layers with constants."""

    def __init__(self, factors):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Layer, factors))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    return (model(batch["x"]) * WEIGHTS).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)} for _ in LRS]


def trained(model, mesh, **how):
    """Return the step, trained as on one device."""
    return trained_alike(model, loss, data(), mesh, NO_DECAY, evaluate=True, **how)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_a_model_with_constants_trains_as_on_one_device(mesh):
    step = trained(Attending(), mesh)
    assert len(step.constants) == 5  # the loss has one too
    assert not [name for name in step.tensors() if "constant" in name]  # constants are not in checkpoints
    model = Attending()
    model.load_state_dict(step.state_dict())
    assert step.evaluate(data()[0]) == pytest.approx(float(loss(model, data()[0])), abs=1e-10)


def test_the_numeric_verifier_knows_their_values():
    trained(Attending(), {"dp_shard": 2}, passes={"verify": "numeric"})


@pytest.mark.parametrize("differ", [False, True])
def test_layers_are_alike_only_if_their_constants_are_equal(differ):
    seen = []
    trained(Deep([0.1 * i if differ else 0.5 for i in range(14)]), {"dp_shard": 2},
            observe=lambda program, record: seen.append(program.folds))  # fmt: skip
    assert any(seen) != differ


class Writing(Attending):
    """A model that counts in an attribute."""

    def forward(self, x):
        self.two.add_(1)
        return super().forward(x)


def test_a_constant_that_is_written_is_refused():
    with pytest.raises(UserError, match="Constant model.two is mutated"):
        compile_lockstep(Writing(), loss, data()[0], {}, NO_DECAY)


def test_a_constant_without_a_value_is_refused_by_name():
    model = nn.Sequential(Attending())
    model[0].scale = model[0].scale.to("meta")
    with pytest.raises(UserError, match=r"^0.scale: is on the meta device.*register it as a buffer"):
        compile_lockstep(model, loss, data()[0], {}, NO_DECAY)
