"""Attention by hand over heads that are merged with the batch into one dim, on either side of it."""

from __future__ import annotations

import pytest
import torch
from oracle import LRS, NO_DECAY, trained_alike
from torch import Tensor, nn

WIDTH = 4  # of a head
MESHES = [{"tp": 2}, {"tp": 4}, {"dp_shard": 2, "tp": 2}]


class Merged(nn.Module):
    """Queries of `heads`, keys and values of `groups`; in the batch of the products heads are minor or major."""

    def __init__(self, heads: int, groups: int, minor: bool, joined: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.groups, self.minor = heads, groups, minor
        sizes = [sum((heads, groups, groups))] if joined else [heads, groups, groups]
        self.inward = nn.ModuleList(nn.Linear(12, n * WIDTH) for n in sizes)
        self.out = nn.Linear(heads * WIDTH, 12)
        self.double()

    def split(self, x: Tensor) -> Tensor:
        """[b, t, h * w] -> [b * heads, t, w] or [heads * b, t, w]."""
        x = x.unflatten(-1, (-1, WIDTH))
        x = x.repeat_interleave(self.heads // x.shape[2], 2)
        return (x.transpose(1, 2) if self.minor else x.permute(2, 0, 1, 3)).reshape(-1, x.shape[1], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([layer(x) for layer in self.inward], -1)
        q, k, v = map(self.split, joined.split([n * WIDTH for n in (self.heads, self.groups, self.groups)], -1))
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        if self.minor:
            return x + self.out(y.view(len(x), self.heads, -1, WIDTH).transpose(1, 2).flatten(2))
        return x + self.out(y.view(self.heads, len(x), -1, WIDTH).permute(1, 2, 0, 3).flatten(2))


class Apart(Merged):
    """Nothing joined: each projection is split by itself."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in self.inward)
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        if self.minor:
            return x + self.out(y.view(len(x), self.heads, -1, WIDTH).transpose(1, 2).flatten(2))
        return x + self.out(y.view(self.heads, len(x), -1, WIDTH).permute(1, 2, 0, 3).flatten(2))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def data(rows):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(rows, 5, 12, generator=generator, dtype=torch.float64)} for _ in LRS]
