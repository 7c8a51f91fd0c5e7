"""Grouped matmuls in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def sliced_products(rows: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
    """Return `F.grouped_mm` of rows [M, in], w [E, in, out] and the ends of each expert's rows, in any dtype."""
    starts = [0, *offs.tolist()[:-1]]
    return torch.cat([rows[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, offs.tolist(), strict=True))])
