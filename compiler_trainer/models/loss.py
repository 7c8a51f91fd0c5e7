"""The call of a model, and losses of its outputs. Shapes: B sequences, T tokens, V = vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError

LossFn = Callable[[nn.Module, dict[str, Tensor]], Tensor | tuple[Tensor, Mapping[str, Tensor]]]
IGNORED_LABEL = -100
PADDING_DOCUMENT = -1  # document number of padding
INPUTS = ("tokens", "labels", "positions", "documents")  # entries of a batch, int64 [B, T] each


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats, as `cross_entropy`, over labels other than -100, of int64 batches [B, T].

    In training mode it includes the auxiliary loss of a decoder that has one.
    """
    out = outputs(model, batch)
    loss = cross_entropy(logits_of(out), batch["labels"])
    return loss + out[1] if isinstance(out, tuple) else loss


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
