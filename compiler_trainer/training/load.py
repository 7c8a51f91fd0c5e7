"""Metrics on how evenly a model uses its experts, from the buffers in which routers store their latest loads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

LOAD, AUXILIARY = ".router.load", ".router.auxiliary"  # endings of the buffers' names


def unevenness(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return metrics, fp64[] each, from routers' buffers: shares [E] and auxiliary losses []; empty without buffers.

    `expert_load/LAYER`: the busiest expert's share over the mean share, from 1 to the number of experts.
    `expert_load_max` and `expert_load_mean`: its maximum and mean over layers. `expert_entropy`: the entropy of the
    shares over that of even shares, from 0 to 1, averaged over layers. `balance_loss`: the sum of auxiliary losses.
    Nothing is read from the device.
    """
    shares = {name.removesuffix(LOAD): value.double() for name, value in buffers.items() if name.endswith(LOAD)}
    shares = {layer: share for layer, share in shares.items() if share.numel() > 1}
    if not shares:
        return {}
    loads = {f"expert_load/{layer}": share.max() * share.numel() for layer, share in shares.items()}
    entropies = [torch.special.entr(s).sum() / math.log(s.numel()) for s in shares.values()]
    losses = [value.double() for name, value in buffers.items() if name.endswith(AUXILIARY)]
    layer_loads = torch.stack([*loads.values()])
    return {
        "expert_load_max": layer_loads.max(),
        "expert_load_mean": layer_loads.mean(),
        "expert_entropy": torch.stack(entropies).mean(),
        **({"balance_loss": torch.stack(losses).sum()} if losses else {}),
        **loads,
    }
