"""Sizes, heads and values that the tests of attention share."""

from __future__ import annotations

import torch
from rule_harness import sharded
from torch import Tensor

from passes.ir.order import Order
from passes.ir.spec import Spec

F64 = torch.float64
TOLERANCE = 1e-10
WIDTH, WINDOW = 4, 5
HEADS = {"MHA": (4, 4), "GQA": (8, 2), "MQA": (4, 1)}
SIZES = {"even": 48, "uneven": 37}
RANKS = (2, 3, 4, 8)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F64)


def shuffled(ranks: int, each: int) -> Order:
    """Return the order with `each` blocks a rank, shuffled."""
    blocks = torch.randperm(ranks * each, generator=torch.Generator().manual_seed(ranks)).view(ranks, each)
    return Order(table=tuple(map(tuple, blocks.tolist())))


def grids(size: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(size)
    return position[:, None], position[None, :]


def documents(size: int) -> Tensor:
    """Return ids of documents of 1, 2, 3... tokens, in two sequences that differ."""
    lengths = torch.repeat_interleave(torch.arange(size), torch.arange(size) + 1)[:size]
    return torch.stack([lengths, lengths.roll(size // 3).cummax(0)[0]])


def sequence(x: Tensor) -> Spec:
    """Return the placement of a sequence sharded on cp, with undefined padding."""
    return sharded(x.shape, x.dim() - 2, "cp", None)
