"""A small model of packed documents, and batches whose documents differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_cases import documents, grids
from torch import Tensor, nn

SIZE = 21


class Packed(nn.Module):
    """Tokens of packed documents, with or without learned positions, one attention within documents or causal."""

    def __init__(self, causal: bool, learned: bool):
        super().__init__()
        self.causal, self.learned = causal, learned
        self.tokens, self.rows = (nn.Embedding(n, 16, dtype=torch.float64) for n in (11, SIZE))
        self.qkv, self.head = (nn.Linear(16, n, dtype=torch.float64) for n in (48, 11))

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        row = torch.arange(SIZE, device=tokens.device)
        x = self.tokens(tokens) + (self.rows(row) if self.learned else row[:, None] / SIZE)
        q, k, v = self.qkv(x).view(*tokens.shape, 3, 4, 4).permute(2, 0, 3, 1, 4)
        i, j = grids(SIZE)
        mask = (ids[:, None, :, None] == ids[:, None, None, :]) & (i >= j)
        y = F.scaled_dot_product_attention(q, k, v, None if self.causal else mask, is_causal=self.causal)
        return self.head((y.transpose(1, 2).flatten(2) + x).cumsum(1) / 9)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["tokens"], batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def packed(causal: bool = False, learned: bool = True) -> Packed:
    """Return a model with the same weights at each call."""
    torch.manual_seed(0)
    return Packed(causal, learned)


def batches(rows: int = 4) -> list[dict[str, Tensor]]:
    """Return batches, each with different documents."""
    generator = torch.Generator().manual_seed(3)

    def one(number: int) -> dict[str, Tensor]:
        tokens, labels = (torch.randint(0, 11, (rows, SIZE), generator=generator) for _ in range(2))
        ids = torch.cat([documents(SIZE), documents(SIZE).flip(1)])[:rows].roll(number, 0)
        return {"tokens": tokens, "labels": labels, "ids": ids}

    return [one(number) for number in range(3)]
