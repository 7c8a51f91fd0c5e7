"""Hand-written attention over heads merged with the batch into one dim, as its minor or its major part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import LRS, NO_DECAY, trained_alike
from sweeps import in_turn
from torch import Tensor, nn

WIDTH = 4  # of a head
MESHES = [{"tp": 2}, {"tp": 4}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}]


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Merged(nn.Module):
    """Attention with `heads` of queries, `groups` of keys and values."""

    def __init__(self, heads: int, groups: int, minor: bool, attend):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.minor, self.attend = heads, minor, attend
        self.q, self.k, self.v = (nn.Linear(12, n * WIDTH) for n in (heads, groups, groups))
        self.out = nn.Linear(heads * WIDTH, 12)
        self.double()

    def split(self, x: Tensor) -> Tensor:
        """Reshape [b, t, h * w] -> [b * heads, t, w] or [heads * b, t, w]."""
        x = x.unflatten(-1, (-1, WIDTH))
        x = x.repeat_interleave(self.heads // x.shape[2], 2)
        return (x.transpose(1, 2) if self.minor else x.permute(2, 0, 1, 3)).reshape(-1, x.shape[1], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*map(self.split, (self.q(x), self.k(x), self.v(x))))
        if self.minor:
            return x + self.out(y.view(len(x), self.heads, -1, WIDTH).transpose(1, 2).flatten(2))
        return x + self.out(y.view(self.heads, len(x), -1, WIDTH).permute(1, 2, 0, 3).flatten(2))


def loss(model, batch):
    return model(batch["x"]).square().mean()


def data(rows):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(rows, 5, 12, generator=generator, dtype=torch.float64)} for _ in LRS]


@pytest.mark.parametrize("minor", [True, False], ids=["heads minor", "heads major"])
@pytest.mark.parametrize(("shape", "mesh"), in_turn([(6, 6, 4), (5, 5, 3), (6, 2, 4)], MESHES), ids=str)
@pytest.mark.sample(2)
def test_projections_are_split_by_whole_heads(shape, minor, mesh):
    heads, groups, rows = shape
    attend = causal if heads % 2 else by_hand
    step = trained_alike(Merged(heads, groups, minor, attend), loss, data(rows), mesh, NO_DECAY)
    dims = {name: spec.dims for name, (spec, _) in step.tensors().items()}
    assert (dims["model.q.weight"][0][0].size, dims["model.q.weight"][0][0].axes) == (heads, ("tp",))
    assert (dims["model.out.weight"][1][0].size, dims["model.out.weight"][1][0].axes) == (heads, ("tp",))
    assert (dims["model.k.weight"][0][0].axes == ("tp",)) == (groups >= mesh["tp"])
