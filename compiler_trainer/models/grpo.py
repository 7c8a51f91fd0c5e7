"""The loss of sampled answers: GRPO and its variants. Shapes: B answers, one per sequence, T tokens, V = vocabulary.

Labels are the tokens of the answers. A batch also has `advantages`, fp32 [B], and log-probabilities of the labels in
nats, fp32 [B, T] each: `sampled` of the sampler, `old` of the trainer with the sampler's weights, if several steps
share the answers, and `reference` of the weights that training starts from, if the loss has their KL divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import GrpoConfig
from compiler_trainer.models.loss import IGNORED_LABEL, widened

Logits = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


def grpo_loss(
    logits: Logits, cfg: GrpoConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and metrics, means of the answers' tokens.

    `gap` is the mean absolute difference between the log-probabilities of sampler and trainer, with the same weights.
    `clip_fraction` is the share of tokens whose ratio is clipped, so that they have no gradient. `kl` is the divergence
    from the reference.
    """
    is_answer = batch["labels"] != IGNORED_LABEL
    logs = token_logs(logits(model, batch), batch["labels"], cfg.temperature)
    old = batch["old"] if "old" in batch else logs.detach()
    ratio, advantages = importance(cfg, logs - old, is_answer), batch["advantages"].unsqueeze(1)
    low, high = 1 - cfg.epsilon, 1 + (cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    difference = old - batch["sampled"]
    if cfg.cap is not None:
        losses = losses * difference.exp().clamp(max=cfg.cap)
    metrics = {"gap": difference.abs(), "clip_fraction": is_clipped.to(logs.dtype).expand_as(logs)}
    if cfg.beta:
        metrics["kl"] = divergence(logs, batch["reference"])
        losses = losses + cfg.beta * metrics["kl"]
    loss = aggregate(cfg, losses.expand_as(logs), is_answer)
    return loss, {name: token_mean(values.detach(), is_answer) for name, values in metrics.items()}


def token_logs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities in nats, fp32 or fp64 [B, T], of labels under logits [B, T, V]; 0 without a label."""
    scaled = widened(logits) if temperature == 1 else widened(logits) / temperature
    return -F.cross_entropy(scaled.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def importance(cfg: GrpoConfig, log_ratios: Tensor, is_answer: Tensor) -> Tensor:
    """Return ratios of probabilities, [B, T]; [B, 1] for their geometric means of equation 7 of arXiv:2507.18071."""
    if cfg.importance == "token":
        return log_ratios.exp()
    return (log_ratios.sum(1) / is_answer.sum(1).clamp(min=1)).exp().unsqueeze(1)


def divergence(logs: Tensor, reference: Tensor) -> Tensor:
    """Return the unbiased estimate of the KL divergence in equation 4 of arXiv:2402.03300, [B, T]."""
    return (reference - logs).exp() - (reference - logs) - 1


def aggregate(cfg: GrpoConfig, losses: Tensor, is_answer: Tensor) -> Tensor:
    """Return the loss of a batch from losses of tokens, [B, T].

    It is the mean of the answers' means (GRPO, equation 3 of arXiv:2402.03300), of all tokens (DAPO, equation 8 of
    arXiv:2503.14476), or of the answers' sums over a constant (Dr. GRPO, arXiv:2503.20783).
    """
    if cfg.aggregation == "token":
        return token_mean(losses, is_answer)
    sums = torch.where(is_answer, losses, 0.0).sum(1)
    lengths = is_answer.sum(1).clamp(min=1) if cfg.aggregation == "sequence" else cfg.answer_tokens
    return (sums / lengths).mean()


def token_mean(values: Tensor, is_answer: Tensor) -> Tensor:
    """Return the mean of values [B, T] over the answers' tokens."""
    return torch.where(is_answer, values, 0.0).sum() / is_answer.sum()


def answer_logs(
    logits: Logits, name: str, temperature: float, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return minus the mean log-probability as a loss, and those of labels, [B, T], as the output `name`."""
    logs = token_logs(logits(model, batch), batch["labels"], temperature)
    return -logs.mean(), {name: logs}
