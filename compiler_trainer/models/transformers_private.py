"""The internals of transformers that are used: how it renames and joins tensors, initializes, masks and balances.

Checked with transformers 5.23; pyproject.toml bounds the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn


class Conversion(NamedTuple):
    """How a model has its stored tensors: names to replace, and several tensors as one."""

    renamings: list[Any]
    converters: list[Any]

    def target(self, name: str, model: Any, wanted: Mapping[str, Tensor]) -> tuple[str, str | None]:
        """The module's name of a stored tensor, and the pattern of the converter that takes it, if one does."""
        rename = import_module("transformers.core_model_loading").rename_source_key
        return rename(name, self.renamings, self.converters, model.base_model_prefix, wanted)


def masks_of(config: Any, dtype: torch.dtype, positions: Tensor, by_layer: bool) -> Any:
    """A causal mask [B, 1, T, T] within the documents that positions [B, T] count from 0, as attention takes it.

    With `by_layer`, one for each kind of layer that the config has, windows included.
    """
    masks = import_module("transformers.masking_utils")
    make = masks.create_masks_for_generate if by_layer else masks.create_causal_mask
    shape_alone = torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device)
    return make(config, shape_alone, attention_mask=None, past_key_values=None, position_ids=positions)


@contextmanager
def balance_of_real_tokens(model: Any, is_real: Tensor) -> Iterator[None]:
    """Let the auxiliary loss of a model's routers leave padding out, where `is_real`, bool [B, T], is false.

    The models take it from their attention mask, of which most need none and some a mask of another form.
    """
    module, name = import_module(type(model).__module__), "load_balancing_loss_func"
    own = getattr(module, name, None)
    if own is None:  # some configs have the field, and the model no such loss
        yield
        return

    def without_padding(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        return own(gate_logits, num_experts, top_k, is_real)

    with patch.object(module, name, without_padding):
        yield


def conversion_of(model: Any) -> Conversion:
    """The conversion of a model that transformers built."""
    kind = import_module("transformers.core_model_loading").WeightConverter
    entries = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return Conversion([e for e in entries if not isinstance(e, kind)], [e for e in entries if isinstance(e, kind)])


def in_order(names: Iterable[str]) -> list[str]:
    """Names of stored tensors as transformers sorts them, numbers by value."""
    return sorted(names, key=import_module("transformers.core_model_loading").dot_natural_key)


def ignored(model: Any) -> list[str]:
    """Patterns of stored names that a model leaves out."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def initialize(model: Any, owner: nn.Module) -> None:
    """Give the parameters of a module of the model the values that they start with."""
    model._init_weights(owner)
