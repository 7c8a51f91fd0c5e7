"""Multi-token prediction of a folder: layers after the model's last one, each of which predicts a later token.

transformers keeps them beside its models, to draft tokens in generation (`MtpModel`); here they are trained. Shapes: B
sequences, T tokens, D features, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.models import folder
from compiler_trainer.models.loss import ahead, cross_entropy, later_labels

SHARED = ("embed_tokens", "shared_head", "rotary_emb")  # modules of the model that its further layers use


def loss_of(
    way: str, weight: float, model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]] | Tensor:
    """Return the loss of the next tokens plus `weight` times the mean of those of later ones, and that as `mtp_loss`.

    The k-th further loss is the cross-entropy of the label k tokens later in the same document. Equation 25 of
    arXiv:2412.19437, with `weight` for lambda. In eval mode it is the loss of the next token alone.
    """
    if not model.training:
        return folder.loss_of(way, model, batch)
    out = folder.outputs(way, model, batch, output_hidden_states=True)
    logits = further_logits(way, model, batch, out.hidden_states[-1])
    losses = [cross_entropy(x, later_labels(batch, k)) for k, x in enumerate(logits, start=1)]
    mean = sum(losses[1:], losses[0]) / len(losses)
    return folder.loss_of_outputs(model, out, batch) + weight * mean, {"mtp_loss": mean.detach()}


def further_logits(way: str, model: nn.Module, batch: Mapping[str, Tensor], states: Tensor) -> list[Tensor]:
    """Return the logits [B, T, V] of each further layer from the states [B, T, D] that the model's head gets.

    Layer k, counted from 1, takes the token k later, at its position, as transformers does in generation.
    """
    mtp: Any = model.get_submodule(folder.FURTHER)
    tokens, logits = batch["tokens"], []
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    positions = positions if way == "causal" else batch["positions"]
    with folder.recurrences_with_starts(way, batch):
        for k in range(1, len(mtp.layers) + 1):
            states = mtp.forward_layer(k - 1, states, positions + k, None, input_ids=ahead(tokens, k))
            logits.append(mtp._project_to_logits(states))
    return logits
