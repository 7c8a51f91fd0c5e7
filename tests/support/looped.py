"""Experts without grouped products: each is a loop of ordinary ones over the tokens that chose it, in any dtype."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.models.experts import Experts, MixtureOfExperts

Model = TypeVar("Model", bound=nn.Module)


class LoopedExperts(nn.Module):
    """The same sum as `Experts`, of whose parameters it has its own copies by the same names."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(w.detach().clone()) for w in (experts.w1, experts.w2, experts.w3))
        self.weighs_input = experts.weighs_input

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[N, D] of tokens `x` [N, D], experts int64 `ids` [N, k] and their `weights` [N, k]."""
        out = torch.zeros_like(x)
        for expert in range(self.w1.shape[0]):
            tokens, slots = torch.where(ids == expert)
            rows, weight = x[tokens], weights[tokens, slots, None]
            if self.weighs_input:
                rows = rows * weight
            made = (F.silu(rows @ self.w1[expert]) * (rows @ self.w3[expert])) @ self.w2[expert]
            out = out.index_add(0, tokens, made if self.weighs_input else made * weight)
        return out


def looped(model: Model) -> Model:
    """A copy of the model with looped experts in place of grouped ones."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.experts = LoopedExperts(module.experts)
    return model


def sliced_products(rows: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
    """What `F.grouped_mm` gives of rows [M, in], w [E, in, out] and the ends of each expert's rows, in any dtype."""
    starts = [0, *offs.tolist()[:-1]]
    return torch.cat([rows[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, offs.tolist(), strict=True))])
