"""Code that all models of `transformers` share: configs without dropout, and losses of their outputs."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, Loss, batches, ids, squares

VOCAB, LENGTH, WIDTH = 37, 13, 24
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def without_dropout(config: Any) -> Any:
    """Disable dropout, layer drop and input masking in a config and those inside it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, name, 0.0)
    return config


def make(model: str, **sizes: Any) -> nn.Module:
    """Build a model of `transformers` from its class and config fields; a class names its own `config_class`."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, model)
    return kind(without_dropout(kind.config_class(**sizes)))


def tokens(generator: torch.Generator) -> Batch:
    """Return ids and targets; the first targets of the first row are ignored."""
    labels = ids(generator, VOCAB, 3, LENGTH)
    labels[0, :4] = -100
    return {"input_ids": ids(generator, VOCAB, 3, LENGTH), "labels": labels}


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the logits at every position."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def ramp_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the first output's distance to a ramp."""
    return squares(model(**batch))


def entry(name: str, model: str, data: Any = tokens, loss: Loss = next_token_loss, **sizes: Any) -> Entry:
    """A model of `transformers`, on data whose dim 1 is a sequence."""
    return Entry(name, "transformers", partial(case, model, data, loss, sizes), sequence=True)


def image_entry(name: str, model: str, data: Any, loss: Loss = ramp_loss, **sizes: Any) -> Entry:
    """A model of `transformers` on data without a sequence."""
    return Entry(name, "transformers", partial(case, model, data, loss, sizes))


def case(model: str, data: Any, loss: Loss, sizes: dict[str, Any]) -> Case:
    """Build the model with its data."""
    return Case(make(model, **sizes), loss, batches(data))
