"""Names of a model and its batch are the user's: none is parsed as a stage or a microbatch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compiler_trainer as ct


class Named(nn.Module):
    """A tied embedding, read by the first and the last stage, and a buffer and entries with an @ in their names."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("seen@1", torch.zeros(()))

    def forward(self, tokens, scale):
        x = self.embedding(tokens) * scale[:, None, None]
        getattr(self, "seen@1").add_(x.detach().mean())
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x @ self.embedding.weight.t()


def loss(model, batch):
    return F.cross_entropy(model(batch["a@1"], batch["a"]).flatten(0, 1), batch["l@0"].flatten())


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp_shard": 2}, {"pp": 4}, {"tp": 2}], ids=str)
def test_a_name_with_an_at_is_a_name(mesh):
    torch.manual_seed(0)
    model = Named().double()
    plain, parts = copy.deepcopy(model), 3
    batch = {"a@1": torch.randint(0, 13, (6, 5)), "a": torch.rand(6).double(), "l@0": torch.randint(0, 13, (6, 5))}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    options = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "max_norm": None}, "lower": {"backend": "eager"}}
    step = ct.compile_step(model, loss, batch, mesh=mesh, microbatches=parts, ranks="lockstep", **options)
    for _ in range(2):
        optimizer.zero_grad()
        losses = [loss(plain, {key: value.chunk(parts)[i] for key, value in batch.items()}) for i in range(parts)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        assert step(batch)["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-12)
    state = step.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
