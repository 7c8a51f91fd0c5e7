"""Losses of outputs other than next tokens. Shapes: B sequences, T tokens; documents of a sequence are numbered from 0.

Outputs are a function of (model, batch): scores [B, T, classes] or hidden states [B, T, D] of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import PASSAGES, ClassifyConfig, EmbedConfig, RewardConfig
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


def embedding_loss(
    outputs: Outputs, cfg: EmbedConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of queries, and the share of them that are nearest to their own passage, from hidden states.

    Document 0 of a sequence is a query, document 1 its passage, and document 2, in triplets, a passage that does not
    answer it. The loss is equation 4 of arXiv:1807.03748 with the passages of all B sequences; with triplets, equation
    5 of arXiv:2104.08821. Batch entries `positive` and, of triplets, `negative`, int64 [B], are equal for
    equal passages: a passage equal to a query's own is no negative of it.
    """
    hidden, pairs = widened(outputs(model, batch)), batch["pairs"]
    names = [name for name in PASSAGES["triplets"] if name in batch]
    query, *passages = (embedding(hidden, batch, cfg.pooling, document) for document in range(1 + len(names)))
    known = torch.cat([has_document(batch, document) for document in range(1, 1 + len(names))])
    is_negative = known & (batch["positive"].unsqueeze(1) != torch.cat([batch[name] for name in names]))
    queries, columns = (torch.arange(len(values), device=query.device) for values in (query, known))
    counts = is_negative | (queries.unsqueeze(1) == columns)
    similarities = torch.where(counts, query @ torch.cat(passages).T / cfg.temperature, -torch.inf)
    losses = F.cross_entropy(similarities, queries, reduction="none")
    return mean(losses, pairs), {"accuracy": mean((similarities.argmax(1) == queries).to(losses.dtype), pairs)}


def embedding(hidden: Tensor, batch: Mapping[str, Tensor], pooling: str, document: int) -> Tensor:
    """Return embeddings of length 1, [B, D], of a document from hidden states [B, T, D]; zeros if there is none."""
    is_taken = tokens_of(batch, document)
    if pooling == "last":
        places = torch.where(is_taken, batch["positions"], -1)
        is_taken = is_taken & (places == places.amax(1, keepdim=True))
    return F.normalize(torch.where(is_taken.unsqueeze(-1), hidden, 0.0).sum(1), dim=-1)


def tokens_of(batch: Mapping[str, Tensor], document: int) -> Tensor:
    """Return bool [B, T], True for the tokens of a document, all of which have labels, without its closing token."""
    return (batch["documents"] == document) & (batch["labels"] != IGNORED_LABEL)


def has_document(batch: Mapping[str, Tensor], document: int) -> Tensor:
    """Return bool [B], True for sequences that have a document."""
    return tokens_of(batch, document).sum(1) > 0


LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "reward": reward_loss,
    "classify": classification_loss,
    "embed": embedding_loss,
}
