"""Time-series models of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Entry, normal, squares
from tests.nightly.models.zoo.media import series
from tests.nightly.models.zoo.transformer import WIDTH, image_entry

STACKS: dict[str, Any] = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
STACKS |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "prediction_length": 6}
STACKS |= {"context_length": 10, "num_time_features": 2, "lags_sequence": [1, 2]}


def dated(generator: torch.Generator) -> Batch:
    """Return a series, its continuation, and time features of both."""
    past = {"past_values": normal(generator, 3, 12), "past_time_features": normal(generator, 3, 12, 2)}
    known = {"past_observed_mask": torch.ones(3, 12)}
    return past | known | {"future_values": normal(generator, 3, 6), "future_time_features": normal(generator, 3, 6, 2)}


def acted(generator: torch.Generator) -> Batch:
    """Return states, actions and their rewards."""
    batch = {"states": normal(generator, 3, 6, 5), "actions": normal(generator, 3, 6, 4)}
    batch |= {"returns_to_go": normal(generator, 3, 6, 1), "rewards": normal(generator, 3, 6, 1)}
    return batch | {"timesteps": torch.arange(6).expand(3, 6).clone(), "attention_mask": torch.ones(3, 6)}


def likely(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's own loss."""
    return model(**batch).loss


def actions(model: nn.Module, batch: Batch) -> Tensor:
    """Return the distance of the actions to a ramp."""
    return squares(model(**batch).action_preds)


MODELS: list[Entry] = [
    image_entry("autoformer", "AutoformerForPrediction", dated, likely, **STACKS, moving_average=3, label_length=4),
    image_entry("decision_transformer", "DecisionTransformerModel", acted, actions, state_dim=5, act_dim=4,
                hidden_size=WIDTH, n_layer=2, n_head=4, max_ep_len=16, n_positions=32),
    image_entry("informer", "InformerForPrediction", dated, likely, **STACKS, attention_type="full"),
    image_entry("patchtsmixer", "PatchTSMixerForPrediction", series, context_length=12, prediction_length=6,
                num_input_channels=2, patch_length=4, patch_stride=4, d_model=WIDTH, num_layers=2,
                mode="mix_channel", gated_attn=True),
    image_entry("time_series_transformer", "TimeSeriesTransformerForPrediction", dated, likely, **STACKS),
]  # fmt: skip
