"""Models that return more than the loss uses: key caches, dataclasses, tuples."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import zoo
from oracle import LRS, NO_DECAY, compile_lockstep, train_plainly, trained_alike
from sweeps import in_turn
from torch import Tensor, nn

MESHES = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}]


@pytest.mark.parametrize(("name", "mesh"), in_turn(["llama", "gpt2", "qwen3"], MESHES), ids=str)
@pytest.mark.sample(1)
def test_a_model_that_caches_its_keys(name, mesh):
    model = zoo.build(name)
    model.config.use_cache = True
    data = [zoo.batch()] * 3
    expected, _ = train_plainly(model, zoo.loss_fn, data, NO_DECAY)
    step = compile_lockstep(model, zoo.loss_fn, data[0], mesh, NO_DECAY)
    for batch, lr, metrics in zip(data, LRS, expected, strict=True):
        assert step(batch, lr) == pytest.approx(metrics, abs=1e-10)


@dataclass
class Outcome:
    """The result of a model, of which the loss uses one field."""

    hidden: list[Tensor]
    attention: tuple[Tensor, ...]
    name: str = "outcome"


class Telling(nn.Module):
    """A model that returns everything it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)).double()

    def forward(self, x):
        hidden, attention = [x], []
        for layer in self.layers:
            y = layer(hidden[-1])
            attention.append((y @ y.mT).softmax(-1))
            hidden.append(attention[-1] @ y)
        return Outcome(hidden, tuple(attention))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_a_dataclass_of_which_one_entry_is_used(mesh):
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)} for _ in LRS]
    trained_alike(Telling(), lambda model, batch: model(batch["x"]).hidden[-1].square().mean(), data, mesh, NO_DECAY)
