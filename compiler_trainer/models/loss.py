"""The training loss of a language model."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy in nats, a fp32 scalar, over labels other than -100; `batch` holds int64 [B, T] tensors.

    In training mode it includes the auxiliary loss of a model that has one.
    """
    out = model(batch["tokens"], batch["positions"], batch.get("documents"))
    logits, auxiliary = out if isinstance(out, tuple) else (out, None)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED_LABEL)
    return loss if auxiliary is None else loss + auxiliary
