"""The call of a model, and losses of its outputs. Shapes: B sequences, T tokens, V = vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError

LossFn = Callable[[nn.Module, dict[str, Tensor]], Tensor | tuple[Tensor, Mapping[str, Tensor]]]
IGNORED_LABEL = -100
PADDING_DOCUMENT = -1  # document number of padding
INPUTS = ("tokens", "labels", "positions", "documents")  # entries of a batch, int64 [B, T] each


class TrainingOutputs(NamedTuple):
    """The outputs of a decoder in training that has more than logits [B, T, V]: what its loss needs, too.

    `balance`, a scalar, is the sum of the layers' auxiliary losses; None without any. `further` are the logits of
    multi-token prediction, [B, T, V] each: those of layer k, counted from 1, predict the token k after the next one.
    """

    logits: Tensor
    balance: Tensor | None
    further: tuple[Tensor, ...]


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats, as `cross_entropy`, over labels other than -100, of int64 batches [B, T].

    In training mode it includes the auxiliary loss of a decoder that has one.
    """
    out = outputs(model, batch)
    loss = cross_entropy(logits_of(out), batch["labels"])
    return loss if not isinstance(out, TrainingOutputs) or out.balance is None else loss + out.balance


def loss_with_further_tokens(
    weight: float, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]] | Tensor:
    """Return the loss of a decoder with multi-token prediction, and the mean of its further losses as `mtp_loss`.

    The k-th further loss is the cross-entropy of the label k tokens later in the same document. Equation 25 of
    arXiv:2412.19437, with `weight` for lambda. In eval mode it is the loss of the next token alone.
    """
    out = outputs(model, batch)
    if not isinstance(out, TrainingOutputs):
        return cross_entropy(out, batch["labels"])
    losses = [cross_entropy(x, later_labels(batch, k)) for k, x in enumerate(out.further, start=1)]
    further = sum(losses[1:], losses[0]) / len(losses)
    loss = cross_entropy(out.logits, batch["labels"]) + weight * further
    return loss + (0.0 if out.balance is None else out.balance), {"mtp_loss": further.detach()}


def later_labels(batch: Mapping[str, Tensor], tokens: int) -> Tensor:
    """Return the labels [B, T] of the position so many tokens later, -100 if it is in another document."""
    labels = ahead(batch["labels"], tokens, IGNORED_LABEL)
    if "documents" not in batch:
        return labels
    documents = batch["documents"]
    return torch.where(ahead(documents, tokens, PADDING_DOCUMENT) == documents, labels, IGNORED_LABEL)


def ahead(values: Tensor, tokens: int, fill: int = 0) -> Tensor:
    """Return values [B, T] of the position so many tokens later, and `fill` where the sequence has ended."""
    return F.pad(values[:, tokens:], (0, tokens), value=fill)


def loss_of_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, as `loss_fn`, of a user's module; outputs other than logits are ignored."""
    return cross_entropy(logits_of(outputs(model, batch)), batch["labels"])


def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Return the model's outputs for `tokens`, its first argument, and other batch entries that its `forward` names."""
    names = list(inspect.signature(model.forward).parameters)[1:]
    return model(batch["tokens"], **{name: batch[name] for name in names if name in batch})


def logits_of(out: Any) -> Tensor:
    """Return logits [B, T, V] of a model's outputs: the tensor itself, its `logits`, or the first of a sequence.

    Raises UserError if there are none.
    """
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", out)
    logits = logits[0] if isinstance(logits, (tuple, list)) and logits else logits
    if not isinstance(logits, Tensor):
        fix = "return them, or give a loss of your own (loss._target_)"
        raise UserError("model", f"returns a {type(out).__name__} without logits; {fix}")
    return logits


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, of logits [B, T, V] over int64 labels [B, T] except -100.

    It is a scalar in fp32, or in fp64 for logits in fp64.
    """
    return F.cross_entropy(widened(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)


def widened(logits: Tensor) -> Tensor:
    """Return logits in fp32, or in fp64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
