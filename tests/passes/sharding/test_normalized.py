"""Operators that are written as others first: two updates are those of plain PyTorch, on meshes that divide nothing."""

from __future__ import annotations

import pytest
import torch
from oracle import NO_DECAY, trained_alike
from torch import nn

MESHES = [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}]
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=str)


class Between(nn.Module):
    """Two linear layers with a function between them; 5 rows of [7, 6]."""

    def __init__(self, function, width: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(6, 6), nn.Linear(width, 3), function

    def forward(self, x):
        return self.down(self.function(torch.tanh(self.up(x))))


def data(*shape: int):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(5, *shape, generator=generator, dtype=torch.float64)} for _ in range(3)]


def loss(model, batch):
    return (model(batch["x"]) - 0.3).square().mean()


def alike(function, mesh, width: int = 6):
    return trained_alike(Between(function, width).double(), loss, data(7, 6), mesh, NO_DECAY)


@every_mesh
def test_what_is_joined_to_an_empty_tensor_of_one_dim(mesh):
    alike(lambda x: torch.cat([x.new_zeros(0), x], -2), mesh)
    alike(lambda x: torch.cat([x, x.new_zeros(0), x.exp()], -1), mesh, 12)


@every_mesh
def test_parts_of_no_entries(mesh):
    alike(lambda x: torch.cat([x[..., :0].exp(), x, x[..., 6:]], -1), mesh)
    alike(lambda x: x + x[:, :, 6:].flatten(1).sum(-1)[:, None, None] + x[:, :0].sum(1, keepdim=True), mesh)
    alike(lambda x: torch.cat([part * 2 for part in x.split([2, 0, 4], -1)], -1), mesh)
