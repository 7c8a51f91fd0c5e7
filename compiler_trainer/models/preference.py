"""Losses of preference pairs. Shapes: B pairs, one per sequence, T tokens, V = vocabulary.

Document 0 of a sequence is the chosen answer with its prompt, document 1 the rejected one; only answers have labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.models.loss import widened

Logits = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


def log_probabilities(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities in nats, fp32 or fp64 [B], of chosen and rejected answers under logits [B, T, V]."""
    labels, documents = batch["labels"], batch["documents"]
    of_tokens = -F.cross_entropy(widened(logits).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (of_tokens * (documents == 0)).sum(1), (of_tokens * (documents == 1)).sum(1)


def dpo(
    logits: Logits, beta: float, label_smoothing: float, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of pairs in nats, and metrics.

    The loss is equation 7 of arXiv:2305.18290, with labels smoothed as in section 3 of Mitchell's cDPO note. A reward
    is `beta` times the log-probability ratio of an answer to the reference's; `reward_accuracy` is the share of pairs
    whose chosen answer has the higher reward, `reward_margin` the difference.
    """
    chosen, rejected = log_probabilities(logits(model, batch), batch)
    chosen, rejected = beta * (chosen - batch["reference_chosen"]), beta * (rejected - batch["reference_rejected"])
    margin, pairs = chosen - rejected, batch["pairs"]
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    metrics = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": margin}
    metrics["reward_accuracy"] = (margin > 0).float()
    return mean(losses, pairs), {name: mean(values, pairs) for name, values in metrics.items()}


def mean(values: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean of values [B] over real pairs, without those that only fill the batch."""
    return torch.where(pairs > 0, values, 0.0).sum() / pairs.sum()


def reference(logits: Logits, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of all log-probabilities as a loss, and the log-probabilities of both answers of each pair."""
    chosen, rejected = log_probabilities(logits(model, batch), batch)
    return -(chosen + rejected).mean(), {"reference_chosen": chosen, "reference_rejected": rejected}
