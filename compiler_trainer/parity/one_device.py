"""A decoder of ours or of transformers that eager PyTorch can train on a CPU in any dtype.

Experts loop over ordinary matmuls, because grouped ones do not support fp64. Masks are dense, because FlexAttention has
no backward on CPUs.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from compiler_trainer.models import Llama, attention
from compiler_trainer.models.experts import Experts, MixtureOfExperts
from compiler_trainer.models.folder import plain

Model = TypeVar("Model", bound=nn.Module)


class LoopedExperts(nn.Module):
    """The same sum as `Experts`, with copies of its parameters under the same names."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(w.detach().clone()) for w in (experts.w1, experts.w2, experts.w3))
        self.weighs_input = experts.weighs_input

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return [N, D] for tokens `x` [N, D], experts int64 `ids` [N, k] and their `weights` [N, k]."""
        out = torch.zeros_like(x)
        for expert in range(self.w1.shape[0]):
            tokens, slots = torch.where(ids == expert)
            rows, weight = x[tokens], weights[tokens, slots, None]
            if self.weighs_input:
                rows = rows * weight
            outputs = (F.silu(rows @ self.w1[expert]) * (rows @ self.w3[expert])) @ self.w2[expert]
            out = out.index_add(0, tokens, outputs if self.weighs_input else outputs * weight)
        return out


def looped(model: Model) -> Model:
    """Return a copy of the model with looped experts in place of grouped ones."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.experts = LoopedExperts(module.experts)  # type: ignore[assignment]
    return model


def on_one_device(model: Model) -> Model:
    """Return a copy of the model that eager PyTorch can train."""
    model = looped(model)
    for part in plain(model).modules():
        if hasattr(part, "set_experts_implementation"):  # of transformers
            part.set_experts_implementation("eager")
    if isinstance(model, Llama) and model.cfg.attention == "documents":
        forward = model.forward

        @functools.wraps(forward)  # callers inspect the names of its arguments
        def dense(*args: Any, **kwargs: Any) -> Any:
            with patch.object(attention, "flex_attention", masked_attention):
                return forward(*args, **kwargs)

        model.forward = dense  # type: ignore[method-assign, assignment]
    return model


def masked_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """Return the result of `flex_attention` for q [B, H, T, h] over k and v [B, K, T, h]."""
    rows, size = q.shape[0], q.shape[2]
    mask = create_mask(block_mask.mask_mod, rows, None, size, size, device=q.device)  # type: ignore[arg-type]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)
