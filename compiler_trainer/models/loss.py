"""How a model is called, and the losses of what it gives. Shapes: B sequences, T tokens, V = vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

LossFn = Callable[[nn.Module, dict[str, Tensor]], Tensor | tuple[Tensor, Mapping[str, Tensor]]]
IGNORED_LABEL = -100
PADDING_DOCUMENT = -1  # the number of the document that padding is of
INPUTS = ("tokens", "labels", "positions", "documents")  # what is in a batch, int64 [B, T] each


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy in nats, a fp32 scalar, over labels other than -100; `batch` holds int64 [B, T] tensors.

    In training mode it includes the auxiliary loss of a decoder that has one.
    """
    out = outputs(model, batch)
    loss = cross_entropy(logits_of(out), batch["labels"])
    return loss + out[1] if isinstance(out, tuple) else loss


def loss_of_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy, as `loss_fn`, of a module of one's own; what it gives beside logits is left out."""
    return cross_entropy(logits_of(outputs(model, batch)), batch["labels"])


def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """What the model gives for `tokens`, its first argument; it gets what else of the batch its `forward` names."""
    names = list(inspect.signature(model.forward).parameters)[1:]
    return model(batch["tokens"], **{name: batch[name] for name in names if name in batch})


def logits_of(out: Any) -> Tensor:
    """Logits [B, T, V] of what a model gives: the tensor itself, its `logits`, or the first of a tuple."""
    out = getattr(out, "logits", out)
    return out[0] if isinstance(out, tuple) else out


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, a fp32 scalar, of logits [B, T, V] over int64 labels [B, T] other than -100."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL)
