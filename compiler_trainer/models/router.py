"""Which experts a token takes, with what weight, and what keeps their shares even.

Shapes: N tokens, D = `dim`, E experts, k = `top_k` chosen for a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import ExpertsConfig


class Router(nn.Module):
    """Top-k of softmax (Mixtral, Qwen3) or sigmoid scores (DeepSeek-V3, arXiv:2412.19437; Llama 4), in fp32 or wider.

    Against uneven shares there are an auxiliary loss (`balance_loss`), and a correction that is added to scores for the
    choice alone and moved by each forward in training mode (`bias_rate`; arXiv:2408.15664). Both go by the shares of
    the real tokens in the forward's batch, which is all that a plain model sees of a step: with n microbatches the loss
    evens out each of them, and the correction moves n times a step, by up to n times the rate. Shares added up over a
    step would be smoother, but the model would have to be told where steps end. A forward that is run again for its
    backward (`torch.utils.checkpoint`) moves the correction twice; a captured one moves it once.

    `load` is each expert's share of the slots in the last forward in training. As it changes there, evaluation is
    captured in eval mode, whether or not there is a correction. `auxiliary` is this layer's auxiliary loss there.
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
        """Experts int64 [N, k] of tokens `x` [N, D], their weights [N, k] in the dtype of `x`, and the auxiliary loss.

        That is None in eval mode, which changes nothing either, and without `balance_loss`. Padding has experts too;
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
        """Scores [N, E] between 0 and 1."""
        return logits.softmax(-1) if self.cfg.score == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        """Experts [N, k] of the highest scores, corrected ones, within the best groups."""
        if self.correction is not None:
            scores = scores + self.correction
        if self.cfg.groups > 1:
            scores = in_best_groups(scores, self.cfg.groups, self.cfg.top_groups)
        return scores.topk(self.cfg.top_k, dim=-1).indices

    def balance(self, scores: Tensor, ids: Tensor, is_real: Tensor | None) -> Tensor | None:
        """Record the shares of the experts, move the correction, and return the auxiliary loss, if there is one."""
        count = self.cfg.count
        # Not from the sorted ids: summed over tokens as they lie, the counts of all ranks add up.
        is_chosen = ids.unsqueeze(-1) == torch.arange(count, device=ids.device)
        tokens: Tensor | int = ids.shape[0]
        if is_real is not None:
            is_chosen, tokens = is_chosen & is_real[:, None, None], is_real.sum()
        slots = is_chosen.sum((0, 1))
        share = slots.to(scores.dtype) / at_least_one(ids.shape[1] * tokens)
        self.load.copy_(share)
        if self.correction is not None:
            # Of integers, so that a mean share is just that.
            towards = (ids.shape[1] * tokens - count * slots).sign().to(scores.dtype)
            self.correction.add_(self.cfg.bias_rate * (towards - towards.mean()))
        if self.auxiliary is None:
            return None
        loss = self.cfg.balance_loss * unevenness(scores, share, is_real)
        self.auxiliary.copy_(loss.detach())
        return loss


def in_best_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """Scores [N, E], -inf outside of the `kept` groups of neighbours whose two best scores have the largest sums."""
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)


def unevenness(scores: Tensor, share: Tensor, is_real: Tensor | None = None) -> Tensor:
    """E sum_e f_e P_e: 1 where all E experts are used alike, up to E where one is (arXiv:2101.03961, equation 4).

    f is each expert's share of the slots, P its mean share of a real token's scores [N, E], through which gradients
    flow.
    """
    shares = scores / scores.sum(-1, keepdim=True)
    if is_real is None:
        mean = shares.mean(0)
    else:
        mean = torch.where(is_real.unsqueeze(-1), shares, 0.0).sum(0) / at_least_one(is_real.sum())
    return scores.shape[-1] * (share * mean).sum()


def at_least_one(count: Tensor | int) -> Tensor | int:
    """A count to divide by: a batch of nothing but padding has no shares."""
    return count.clamp(min=1) if isinstance(count, Tensor) else count


def like_linear(weight: Tensor, fan_in: int) -> Tensor:
    """`weight` filled as `nn.Linear` fills its own: PyTorch's initialisers take the dims of experts for a kernel's."""
    return nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)
