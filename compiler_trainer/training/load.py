"""How evenly a model's experts are used, of the buffers in which its routers keep each expert's share of the slots."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

LOAD = ".router.load"  # how the names of these buffers end


def unevenness(buffers: Mapping[str, Tensor]) -> dict[str, float]:
    """`expert_load_max`: the busiest expert's share over the mean share, in the worst layer, from 1 to the number of
    experts; `expert_load_mean`: its mean over layers; `expert_entropy`: the entropy of the shares over that of even
    ones, the mean over layers, from 0 to 1. Of [E] shares in buffers of routers; empty where there are none.
    """
    shares = [value.double() for name, value in buffers.items() if name.endswith(LOAD) and value.numel() > 1]
    if not shares:
        return {}
    loads = [float(share.max() * share.numel()) for share in shares]
    entropies = [float(torch.special.entr(s).sum()) / math.log(s.numel()) for s in shares]
    return {
        "expert_load_max": max(loads),
        "expert_load_mean": sum(loads) / len(loads),
        "expert_entropy": sum(entropies) / len(entropies),
    }
