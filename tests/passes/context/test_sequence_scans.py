"""Linear attention and short convolutions train as on one device: in every order of a sequence, with documents in it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, trained_alike
from sweeps import in_turn
from torch import nn

from passes.ops.linear_attention import causal_conv1d, linear_attention

SIZE = 21
MESHES = [{"cp": 2}, {"cp": 3, "dp_shard": 2}, {"cp": 5}, {"tp": 2}, {"tp": 3, "cp": 2}, {"cp": 8}, {"dp_shard": 3}]
ORDERS = [{"load_balance": "none"}, {"load_balance": "head_tail"}, {"load_balance": "blocks", "block": 2}]
KINDS = ["delta", "delta by row", "plain", "plain, packed", "delta, packed"]


class Hybrid(nn.Module):
    """A convolution and linear attention of 4 heads, then attention within documents."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.widths = kind, [12, 12, 8, 12 if "by row" in kind else 4, 4]
        self.embed, self.inner, self.qkv, self.head = nn.Embedding(11, 16), nn.Linear(16, sum(self.widths)), nn.Linear(16, 48), nn.Linear(16, 11)
        self.weight, self.out = nn.Parameter(torch.randn(32, 4) / 2), nn.Linear(8, 16)
        self.double()

    def forward(self, tokens, positions):
        x, starts = self.embed(tokens), positions == 0 if "packed" in self.kind else None
        mixed, decay, beta = self.inner(x).split([32, *self.widths[3:]], -1)
        mixed = F.silu(causal_conv1d(mixed.transpose(1, 2), self.weight, None, starts)).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (4, -1)) for y in mixed.split(self.widths[:3], -1))
        decay = -F.softplus(decay.unflatten(-1, (4, -1)) if "by row" in self.kind else decay)
        beta = beta.sigmoid() if "delta" in self.kind else None
        x = x + self.out(linear_attention(q, F.normalize(k, dim=-1), v, decay, beta, starts).flatten(2))
        q, k, v = self.qkv(x).view(*tokens.shape, 3, 4, 4).permute(2, 0, 3, 1, 4)
        at = torch.arange(SIZE, device=tokens.device)
        document = at - positions  # the place of its first token
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (at[:, None] >= at)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"], batch["positions"]).flatten(0, 1), batch["labels"].flatten())


def data():
    """Return batches of three rows, in which documents end at different places."""
    generator, at = torch.Generator().manual_seed(1), torch.arange(SIZE)

    def one(number):
        tokens, labels = (torch.randint(0, 11, (3, SIZE), generator=generator) for _ in range(2))
        turns = torch.rand(3, SIZE, generator=generator) < 0.2
        turns[:, 0] = True
        return {"tokens": tokens, "labels": labels, "positions": at - torch.where(turns, at, 0).cummax(1).values}

    return [one(number) for number in range(3)]


@pytest.mark.parametrize(("kind", "mesh", "order"), in_turn(KINDS, MESHES, ORDERS), ids=str)
@pytest.mark.sample(4)
def test_it_trains_as_on_one_device(kind, mesh, order):
    step = trained_alike(Hybrid(kind), loss, data(), mesh, NO_DECAY, passes={"context": order})
    if "cp" in mesh:
        (report,) = (r["report"] for r in step.report["passes"] if (r["program"], r["name"]) == ("forward", "shard"))
        gathered = [c for c in report["reshards"] if c["before"].count("@cp") > c["after"].count("@cp") and "replicate(cp)" not in c["after"]]
        assert gathered == [], "no rank has activations of the whole sequence"
