"""Bounds of attention by interval: the keys that each of at most 300 queries sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BOUNDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {  # (positions of queries, first and last of their documents)
    "causal": lambda i, start, end: (torch.zeros_like(i), i + 1),
    "documents": lambda i, start, end: (start, i + 1),
    "documents both ways": lambda i, start, end: (start, end),
    "documents and window": lambda i, start, end: (start.maximum(i - 70), i + 1),
    "window": lambda i, start, end: (i - 70, i + 1),
    "prefix": lambda i, start, end: (torch.zeros_like(i), (i + 1).clamp(min=100)),
    "any": lambda i, start, end: ((i * 7919) % 300, (i * 7919) % 300 + (i * 31) % 150 - 20),
}
LENGTHS = (1, 2, 3, 50, 60, 1, 1, 130, 20, 200)


def bounds_of(name: str, size: int) -> tuple[Tensor, Tensor]:
    """Return the first and last keys that queries see, in two sequences that differ."""
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[:size]
    ids = torch.stack([ids, ids.flip(0).neg()])
    start, end = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
    found = BOUNDS[name](torch.arange(size).expand(2, -1), start, end)
    return found[0].clamp(0, size), found[1].clamp(0, size)
