"""The router of a mixture of experts: choice of experts, their weights, and load balancing.

Shapes: N tokens, D = `dim`, E experts, k = `top_k` experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import ExpertsConfig


class Router(nn.Module):
    """Top-k of softmax (Mixtral, Qwen3) or sigmoid scores (DeepSeek-V3, arXiv:2412.19437; Llama 4), in fp32 or wider.

    Two means even out the load: an auxiliary loss (`balance_loss`), and a correction that is added to scores for the
    choice alone and moved by each forward in training mode (`bias_rate`; arXiv:2408.15664). Both use the shares of the
    real tokens in the forward's batch, because a plain model sees no more of a step. So with n microbatches the loss
    evens out each of them, and the correction moves n times per step, by up to n times the rate. Shares added up over a
    step would be smoother, but the model would need to know where steps end. A forward that is run again for its
    backward (`torch.utils.checkpoint`) moves the correction twice; a captured forward moves it once.

    `load` is each expert's share of the slots in the last training forward. Because it changes there, evaluation is
    captured in eval mode, with or without a correction. `auxiliary` is this layer's auxiliary loss in that forward.
    """

    load: Tensor
    correction: Tensor | None
    auxiliary: Tensor | None

    def __init__(self, dim: int, cfg: ExpertsConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(like_linear(torch.empty(cfg.count, dim), dim))
        self.register_buffer("load", torch.zeros(cfg.count))
        self.register_buffer("correction", torch.zeros(cfg.count) if cfg.bias_rate else None)
        self.register_buffer("auxiliary", torch.zeros(()) if cfg.balance_loss else None)

    def forward(self, x: Tensor, is_real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return experts int64 [N, k] of tokens `x` [N, D], weights [N, k] in `x`'s dtype, and the auxiliary loss.

        The loss is None without `balance_loss` and in eval mode, in which no buffer changes. Padding is also routed;
        with `is_real`, bool [N], it does not count in loads, the correction and the auxiliary loss.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = self.score(F.linear(x.to(wide), self.weight.to(wide)))
        ids = self.choose(scores.detach())
        weights = scores.gather(1, ids)
        if self.cfg.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        balance = self.balance(scores, ids, is_real) if self.training else None
        return ids, (self.cfg.scale * weights).to(x.dtype), balance

    def score(self, logits: Tensor) -> Tensor:
        """Return scores [N, E] between 0 and 1."""
        return logits.softmax(-1) if self.cfg.score == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        """Return experts [N, k] with the highest corrected scores within the best groups."""
        if self.correction is not None:
            scores = scores + self.correction
        if self.cfg.groups > 1:
            scores = in_best_groups(scores, self.cfg.groups, self.cfg.top_groups)
        return scores.topk(self.cfg.top_k, dim=-1).indices

    def balance(self, scores: Tensor, ids: Tensor, is_real: Tensor | None) -> Tensor | None:
        """Record the shares of the experts, move the correction, and return the auxiliary loss, if there is one."""
        count = self.cfg.count
        # Not from the sorted ids: summed over unsorted tokens, the counts of all ranks add up.
        is_chosen = ids.unsqueeze(-1) == torch.arange(count, device=ids.device)
        tokens: Tensor | int = ids.shape[0]
        if is_real is not None:
            is_chosen, tokens = is_chosen & is_real[:, None, None], is_real.sum()
        slots = is_chosen.sum((0, 1))
        share = slots.to(scores.dtype) / at_least_one(ids.shape[1] * tokens)
        self.load.copy_(share)
        if self.correction is not None:
            # In integers, so that an even share is exactly zero.
            towards = (ids.shape[1] * tokens - count * slots).sign().to(scores.dtype)
            self.correction.add_(self.cfg.bias_rate * (towards - towards.mean()))
        if self.auxiliary is None:
            return None
        loss = self.cfg.balance_loss * unevenness(scores, share, is_real)
        self.auxiliary.copy_(loss.detach())
        return loss


def in_best_groups(scores: Tensor, groups: int, chosen: int) -> Tensor:
    """Return scores [N, E], -inf outside the `chosen` groups of neighbours with the largest sums of two best scores."""
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)


def unevenness(scores: Tensor, share: Tensor, is_real: Tensor | None = None) -> Tensor:
    """Return E sum_e f_e P_e: 1 if all E experts are used alike, up to E if one is (arXiv:2101.03961, equation 4).

    f is each expert's share of the slots, P the mean share of real tokens' scores [N, E], through which gradients flow.
    """
    shares = scores / scores.sum(-1, keepdim=True)
    if is_real is None:
        mean = shares.mean(0)
    else:
        mean = torch.where(is_real.unsqueeze(-1), shares, 0.0).sum(0) / at_least_one(is_real.sum())
    return scores.shape[-1] * (share * mean).sum()


def at_least_one(count: Tensor | int) -> Tensor | int:
    """Return a count to divide by, at least 1: a batch of nothing but padding has no shares."""
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def like_linear(weight: Tensor, fan_in: int) -> Tensor:
    """Fill `weight` as `nn.Linear` does; PyTorch's initializers would take the dim of experts for a kernel's."""
    return nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)
