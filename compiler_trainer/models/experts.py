"""Mixture of experts for one device: a router gives each token few of many feed-forward layers, the experts.

    ids [N, k] -> sort -> rows by expert -> grouped products -> slots in their order again -> sum over a token's slots

Shapes: N tokens, D = `dim`, E experts of W = `width` features inside, k = `top_k` slots a token. All are static,
however uneven the choice: no count is read by the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import ExpertsConfig
from compiler_trainer.models.feed_forward import FeedForward
from compiler_trainer.models.router import Router, like_linear


class MixtureOfExperts(nn.Module):
    """Routed experts and, of the same width each, shared ones that every token takes (arXiv:2401.06066)."""

    def __init__(self, dim: int, cfg: ExpertsConfig):
        super().__init__()
        self.router = Router(dim, cfg)
        self.experts = Experts(dim, cfg)
        self.shared = FeedForward(dim, cfg.shared * cfg.width) if cfg.shared else None

    def forward(self, x: Tensor, is_real: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[B, T, D] of `x` [B, T, D], and this layer's auxiliary loss, None in eval mode or without one.

        Tokens that are not real, bool [B, T], are padding, which does not count in what keeps shares even.
        """
        tokens = x.flatten(0, 1)
        ids, weights, balance = self.router(tokens, None if is_real is None else is_real.flatten())
        out = self.experts(tokens, ids, weights).view(x.shape)
        return out if self.shared is None else out + self.shared(x), balance


class Experts(nn.Module):
    """E SwiGLU layers, their weights in 3-D parameters [E, in, out]."""

    def __init__(self, dim: int, cfg: ExpertsConfig):
        super().__init__()
        self.weighs_input = cfg.weigh == "input"
        self.w1 = nn.Parameter(like_linear(torch.empty(cfg.count, dim, cfg.width), dim))
        self.w2 = nn.Parameter(like_linear(torch.empty(cfg.count, cfg.width, dim), cfg.width))
        self.w3 = nn.Parameter(like_linear(torch.empty(cfg.count, dim, cfg.width), dim))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[N, D], the sum of what the experts int64 `ids` [N, k] make of tokens `x` [N, D], times `weights` [N, k]."""
        k = ids.shape[1]
        experts, slots = torch.sort(ids.reshape(-1))
        rows, weight = x[slots // k], weights.reshape(-1)[slots].unsqueeze(1)
        ends = rows_by_expert(experts, self.w1.shape[0]).cumsum(0, dtype=torch.int32)
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
    """How often each of `count` numbers is among the int64 `experts`, as a float or int32 tensor [count]."""
    # The size of what bincount returns depends on the data. histc takes no integers on the CPU, and in deterministic
    # mode no floats on CUDA.
    countable = experts.float() if experts.device.type == "cpu" else experts.int()
    return torch.histc(countable, bins=count, min=0, max=count - 1)
