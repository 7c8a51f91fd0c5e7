"""How evenly a model's experts are used, of the buffers in which its routers keep what they saw last."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

LOAD, AUXILIARY = ".router.load", ".router.auxiliary"  # how the names of these buffers end


def unevenness(buffers: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics of shares [E] and auxiliary losses [] in buffers of routers; empty where there are none.

    `expert_load/LAYER`: the busiest expert's share over the mean share, from 1 to the number of experts;
    `expert_load_max` and `expert_load_mean`: of the worst layer, and the mean of layers; `expert_entropy`: the entropy
    of the shares over that of even ones, from 0 to 1, the mean of layers; `balance_loss`: the sum of auxiliary losses.
    """
    shares = {name.removesuffix(LOAD): value.double() for name, value in buffers.items() if name.endswith(LOAD)}
    shares = {layer: share for layer, share in shares.items() if share.numel() > 1}
    if not shares:
        return {}
    loads = {f"expert_load/{layer}": float(share.max() * share.numel()) for layer, share in shares.items()}
    entropies = [float(torch.special.entr(s).sum()) / math.log(s.numel()) for s in shares.values()]
    losses = [float(value) for name, value in buffers.items() if name.endswith(AUXILIARY)]
    return {
        "expert_load_max": max(loads.values()),
        "expert_load_mean": sum(loads.values()) / len(loads),
        "expert_entropy": sum(entropies) / len(entropies),
        **({"balance_loss": sum(losses)} if losses else {}),
        **loads,
    }
