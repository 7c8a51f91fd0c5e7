"""Losses of outputs other than next tokens. Shapes: B sequences, T tokens; documents of a sequence are numbered from 0.

Outputs are a function of (model, batch): scores [B, T, classes] of the tokens of a model of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import ClassifyConfig, RewardConfig
from compiler_trainer.models.loss import IGNORED_LABEL, cross_entropy, widened
from compiler_trainer.models.preference import mean

Outputs = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


def reward_loss(
    outputs: Outputs, cfg: RewardConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of pairs, and metrics named as those of `preference_loss`, from scores [B, T, 1].

    It is equation 1 of arXiv:2203.02155, with margins equation 2 of arXiv:2307.09288, plus `center` times the squared
    sum of a pair's scores (equation 2 of arXiv:2312.09244).
    """
    scores, pairs = widened(outputs(model, batch)).squeeze(-1), batch["pairs"]
    chosen, rejected = (score_of(scores, batch, document) for document in (0, 1))
    margin = chosen - rejected
    losses = -F.logsigmoid(margin - batch["margins"] if "margins" in batch else margin)
    if cfg.center:
        losses = losses + cfg.center * (chosen + rejected).square()
    metrics = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": margin}
    metrics["reward_accuracy"] = (margin > 0).float()
    return mean(losses, pairs), {name: mean(values, pairs) for name, values in metrics.items()}


def score_of(scores: Tensor, batch: Mapping[str, Tensor], document: int) -> Tensor:
    """Return the scores [B] of a document's last token that is a label, from those of all tokens, [B, T].

    Labels are next tokens, so it is the token after the last one that has a label.
    """
    positions, is_document = batch["positions"], batch["documents"] == document
    has_label = is_document & (batch["labels"] != IGNORED_LABEL)
    last = torch.where(has_label, positions, -1).amax(1, keepdim=True) + 1
    return torch.where(is_document & (positions == last), scores, 0.0).sum(1)


def classification_loss(
    outputs: Outputs, cfg: ClassifyConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross-entropy in nats of the classes of texts, from scores [B, T, classes], and the accuracy.

    Labels, int64 [B, T], are the numbers of classes at the last tokens of texts.
    """
    scores, labels = widened(outputs(model, batch)), batch["labels"]
    has_label = labels != IGNORED_LABEL
    is_right = (has_label & (scores.argmax(-1) == labels)).to(scores.dtype)
    return cross_entropy(scores, labels), {"accuracy": is_right.sum() / has_label.sum()}


LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "reward": reward_loss,
    "classify": classification_loss,
}
