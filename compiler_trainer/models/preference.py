"""Losses of preference pairs. Shapes: B pairs, one per sequence, T tokens, V = vocabulary.

Document 0 of a sequence is the chosen answer with its prompt, document 1 the rejected one, for KTO document 2 the
answer of another pair; only answers have labels. Single answers are document 0, and an unrelated one is document 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import (
    ANSWER_REFERENCE,
    REFERENCE,
    CpoConfig,
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    PreferenceConfig,
    SimpoConfig,
)
from compiler_trainer.models.loss import IGNORED_LABEL, widened

Logits = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


class Answers(NamedTuple):
    """The chosen, the rejected or the unrelated answers of a batch.

    `scores`, fp32 or fp64 [B], are log-probabilities in nats, minus the reference's if the loss has one. `tokens`,
    int64 [B], are numbers of tokens, 0 for samples that only fill the batch.
    """

    scores: Tensor
    tokens: Tensor

    @property
    def means(self) -> Tensor:
        """The mean score of each answer's tokens, [B]."""
        return self.scores / self.tokens.clamp(min=1)


class PairLosses(NamedTuple):
    """The loss of each pair and the rewards of its answers, [B] each.

    A reward is `beta` times an answer's score, or times its mean score per token, as the loss uses it.
    """

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


# ---- one function per loss -----------------------------------------------------------------------------


def dpo(cfg: DpoConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return equation 7 of arXiv:2305.18290, with labels smoothed as in section 3 of Mitchell's cDPO note."""
    rewards = cfg.beta * chosen.scores, cfg.beta * rejected.scores
    margin = rewards[0] - rewards[1]
    losses = -(1 - cfg.label_smoothing) * F.logsigmoid(margin) - cfg.label_smoothing * F.logsigmoid(-margin)
    return PairLosses(losses, *rewards)


def ipo(cfg: IpoConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return equation 17 of arXiv:2310.12036, with `beta` for tau and the mean score of an answer's tokens.

    The paper has log-probabilities of whole answers. TRL (loss_type="ipo") divides them by the number of tokens, as the
    paper's authors did for their results.
    """
    rewards = cfg.beta * chosen.means, cfg.beta * rejected.means
    return PairLosses((chosen.means - rejected.means - 1 / (2 * cfg.beta)).square(), *rewards)


def simpo(cfg: SimpoConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return equation 6 of arXiv:2405.14734."""
    rewards = cfg.beta * chosen.means, cfg.beta * rejected.means
    return PairLosses(-F.logsigmoid(rewards[0] - rewards[1] - cfg.gamma), *rewards)


def orpo(cfg: OrpoConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return equation 7 of arXiv:2403.07691, with `beta` for lambda; log-likelihoods are means of an answer's tokens.

    The other term of equation 6 is the mean negative log-likelihood of the chosen answers' tokens. TRL counts the
    prompt's tokens in it, too.
    """
    margin = log_odds(chosen.means) - log_odds(rejected.means)
    return PairLosses(-cfg.beta * F.logsigmoid(margin), cfg.beta * chosen.means, cfg.beta * rejected.means)


def log_odds(logs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log-probabilities in nats, [B]; p = 1 counts as less, so that the result is finite."""
    logs = logs.clamp(max=-torch.finfo(logs.dtype).eps)
    return logs - torch.log(-torch.expm1(logs))


def cpo(cfg: CpoConfig, chosen: Answers, rejected: Answers) -> PairLosses:
    """Return equation 3 of arXiv:2401.08417.

    The other term of the loss is the mean negative log-likelihood of the chosen answers' tokens, as in TRL.
    """
    rewards = cfg.beta * chosen.scores, cfg.beta * rejected.scores
    return PairLosses(-F.logsigmoid(rewards[0] - rewards[1]), *rewards)


def kto(cfg: KtoConfig, chosen: Answers, rejected: Answers, unrelated: Answers) -> PairLosses:
    """Return the loss of section 4 of arXiv:2402.01306 for both answers of a pair, averaged."""
    point = cfg.beta * reference_point(unrelated)
    rewards = cfg.beta * chosen.scores, cfg.beta * rejected.scores
    desirable = cfg.desirable_weight * torch.sigmoid(point - rewards[0])
    undesirable = cfg.undesirable_weight * torch.sigmoid(rewards[1] - point)
    return PairLosses((desirable + undesirable) / 2, *rewards)


def reference_point(unrelated: Answers) -> Tensor:
    """Return KTO's reference point: the mean score of unrelated answers in a microbatch of all ranks, at least 0.

    It has no gradient, as in the paper and in TRL.
    """
    is_real = unrelated.tokens > 0
    point = torch.where(is_real, unrelated.scores.detach(), 0.0).sum() / is_real.sum().clamp(min=1)
    return point.clamp(min=0)


LOSSES: dict[str, Callable[..., PairLosses]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "cpo": cpo,
    "kto": kto,
}


# ---- from a batch to its loss --------------------------------------------------------------------------


def preference_loss(
    logits: Logits, cfg: PreferenceConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, a mean of pairs and maybe a mean negative log-likelihood of tokens, and metrics.

    `reward_accuracy` is the share of pairs whose chosen answer has the higher reward, `reward_margin` the difference.
    """
    log_probs, pairs = log_probabilities(logits(model, batch), batch, cfg.answers), batch["pairs"]
    labelled = [(batch["labels"] != IGNORED_LABEL) & (batch["documents"] == i) for i in range(cfg.answers)]
    scores = [x - batch[name] for x, name in zip(log_probs, REFERENCE)] if cfg.has_reference else log_probs
    result = LOSSES[cfg.name](cfg, *(Answers(x, n.sum(1)) for x, n in zip(scores, labelled)))
    margin = result.chosen - result.rejected
    metrics = {"reward_chosen": result.chosen, "reward_rejected": result.rejected, "reward_margin": margin}
    metrics["reward_accuracy"] = (margin > 0).float()
    loss = mean(result.losses, pairs)
    if cfg.nll_weight:
        loss = loss - cfg.nll_weight * (log_probs[0].sum() / labelled[0].sum())
    return loss, {name: mean(values, pairs) for name, values in metrics.items()}


def judged_loss(
    logits: Logits, cfg: KtoConfig, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return KTO's loss (section 4 of arXiv:2402.01306), a mean of single answers, and metrics.

    The entry `desirable`, fp32 [B], is 1 for desirable answers and 0 for others. `kl` is the reference point.
    `reward_margin` is the distance by which an answer's reward is on the right side of it, above if the answer is
    desirable, and `reward_accuracy` the share of answers that are.
    """
    log_probs, answers = log_probabilities(logits(model, batch), batch, 2), batch["pairs"]
    tokens = [((batch["labels"] != IGNORED_LABEL) & (batch["documents"] == i)).sum(1) for i in range(2)]
    scores = [x - batch[name] for x, name in zip(log_probs, ANSWER_REFERENCE)]
    point, is_desirable = reference_point(Answers(scores[1], tokens[1])), batch["desirable"] > 0
    margin = cfg.beta * torch.where(is_desirable, scores[0] - point, point - scores[0])
    losses = torch.sigmoid(-margin)
    losses = torch.where(is_desirable, cfg.desirable_weight * losses, cfg.undesirable_weight * losses)
    metrics = {"reward_margin": mean(margin, answers), "reward_accuracy": mean((margin > 0).float(), answers)}
    return mean(losses, answers), {"kl": point, **metrics}


def log_probabilities(logits: Tensor, batch: Mapping[str, Tensor], answers: int) -> list[Tensor]:
    """Return log-probabilities in nats, fp32 or fp64 [B], of each of the `answers` under logits [B, T, V]."""
    labels, documents = batch["labels"], batch["documents"]
    of_tokens = -F.cross_entropy(widened(logits).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return [(of_tokens * (documents == i)).sum(1) for i in range(answers)]


def mean(values: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean of values [B] over real pairs, without those that only fill the batch."""
    return torch.where(pairs > 0, values, 0.0).sum() / pairs.sum()


def reference(
    logits: Logits, entries: Sequence[str], model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of all log-probabilities as a loss, and those of each answer, one of `entries` each."""
    log_probs = log_probabilities(logits(model, batch), batch, len(entries))
    return -torch.stack(log_probs).sum(0).mean(), dict(zip(entries, log_probs))
