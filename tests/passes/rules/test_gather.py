"""gather along dims flattened from two dims, of which ranks hold parts."""

from __future__ import annotations

import pytest
import torch
from oracle import LRS, NO_DECAY, trained_alike
from torch import nn


class Chosen(nn.Module):
    """Gathers the five tokens with the highest scores over all rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.r, self.o = nn.Embedding(11, 8), nn.Linear(8, 1), nn.Linear(8, 3)
        self.double()

    def forward(self, tokens):
        y = self.e(tokens).flatten(0, 1)
        weights, at = self.r(y)[:, 0].topk(5)
        return self.o(y.gather(0, at[:, None].expand(-1, 8))) * weights[:, None].sigmoid()


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "cp": 2}, {"dp_shard": 2}, {"cp": 3}], ids=str)
@pytest.mark.sample(2)
def test_along_batch_and_sequence_flattened(mesh):
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randint(0, 11, (5, 7), generator=generator)} for _ in LRS]
    trained_alike(Chosen(), lambda m, b: m(b["x"]).square().mean(), data, mesh, NO_DECAY)
