"""Mixture of experts for one device: a router sends each token to a few of many feed-forward layers, the experts.

    ids [N, k] -> sort -> rows by expert -> grouped matmuls -> slots in original order -> sum over a token's slots

Shapes: N tokens, D = `dim`, E experts with W = `width` hidden features, k = `top_k` slots of a token. All shapes are
static, however uneven the choice: the host reads no count.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import ExpertsConfig
from compiler_trainer.models.feed_forward import FeedForward
from compiler_trainer.models.router import Router, like_linear


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared experts of the same width that every token goes through (arXiv:2401.06066)."""

    def __init__(self, dim: int, cfg: ExpertsConfig):
        super().__init__()
        self.router = Router(dim, cfg)
        self.experts = Experts(dim, cfg)
        self.shared = FeedForward(dim, cfg.shared * cfg.width) if cfg.shared else None

    def forward(self, x: Tensor, is_real: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return [B, T, D] for `x` [B, T, D], and this layer's auxiliary loss, None in eval mode or without one.

        Tokens for which `is_real`, bool [B, T], is False are padding, which does not count in load balancing.
        """
        tokens = x.flatten(0, 1)
        ids, weights, balance = self.router(tokens, None if is_real is None else is_real.flatten())
        out = self.experts(tokens, ids, weights).view(x.shape)
        return out if self.shared is None else out + self.shared(x), balance


class Experts(nn.Module):
    """E SwiGLU layers, their weights in 3-D parameters [E, in, out]."""

    is_transposed = True  # against linear layers, as transformers has it

    def __init__(self, dim: int, cfg: ExpertsConfig):
        super().__init__()
        self.num_experts = cfg.count
        self.weighs_input = cfg.weigh == "input"
        self.w1 = nn.Parameter(like_linear(torch.empty(cfg.count, dim, cfg.width), dim))
        self.w2 = nn.Parameter(like_linear(torch.empty(cfg.count, cfg.width, dim), cfg.width))
        self.w3 = nn.Parameter(like_linear(torch.empty(cfg.count, dim, cfg.width), dim))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return [N, D], the sum of the experts' outputs for `x` [N, D] by int64 `ids` and `weights`, each [N, k]."""
        k = ids.shape[1]
        experts, slots = torch.sort(ids.reshape(-1))
        rows, weight = x[slots // k], weights.reshape(-1)[slots].unsqueeze(1)
        ends = rows_by_expert(experts, self.num_experts).cumsum(0, dtype=torch.int32)
        if self.weighs_input:
            rows = rows * weight
        hidden = F.silu(F.grouped_mm(rows, self.w1, offs=ends)) * F.grouped_mm(rows, self.w3, offs=ends)
        out = F.grouped_mm(hidden, self.w2, offs=ends)
        if not self.weighs_input:
            out = out * weight
        places = torch.empty_like(slots)
        places[slots] = torch.arange(slots.shape[0], device=slots.device)
        return out[places].view(*ids.shape, -1).sum(1)


def rows_by_expert(experts: Tensor, count: int) -> Tensor:
    """Return how often each of `count` numbers occurs in the int64 `experts`, as a float or int32 tensor [count]."""
    # The size of bincount's result depends on the data. histc takes no integers on the CPU, and in deterministic mode
    # no floats on CUDA.
    countable = experts.float() if experts.device.type == "cpu" else experts.int()
    return torch.histc(countable, bins=count, min=0, max=count - 1)
