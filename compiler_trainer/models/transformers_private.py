"""The internals of transformers that we use: renaming and joining of tensors, initialization, masks and load balancing.

Checked with transformers 5.23; pyproject.toml bounds the version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor


class Conversion(NamedTuple):
    """The conversion of a model's stored tensors: names to replace, and tensors to join."""

    renamings: list[Any]
    converters: list[Any]

    def target(self, name: str, model: Any, expected: Mapping[str, Tensor]) -> tuple[str, str | None]:
        """Return the module's name of a stored tensor, and the pattern of its converter, None if it has none."""
        rename = import_module("transformers.core_model_loading").rename_source_key
        target, pattern = rename(name, self.renamings, self.converters, model.base_model_prefix, expected)
        return (name, None) if target not in expected and name in expected else (target, pattern)


def masks_of(config: Any, dtype: torch.dtype, positions: Tensor, by_layer: bool) -> Any:
    """Return a causal mask [B, 1, T, T] within documents, whose positions [B, T] count from 0.

    With `by_layer`, return one for each kind of layer that the config has, windows included.
    """
    masks = import_module("transformers.masking_utils")
    make = masks.create_masks_for_generate if by_layer else masks.create_causal_mask
    shape_alone = torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device)
    return make(config, shape_alone, attention_mask=None, past_key_values=None, position_ids=positions)


def masks_with_images(model: Any, dtype: torch.dtype, positions: Tensor, is_image: Tensor) -> dict[str, Tensor]:
    """Return the masks of each kind of layer of a Gemma whose images attend within themselves both ways.

    As `masks_of`, but tokens also see later ones of the same image; none for other models. transformers 5.23 reads
    images at positions within the document, and so finds others if a sequence has several documents.
    """
    module, config = import_module(type(model).__module__), model.config.get_text_config()
    if not hasattr(module, "create_masks_for_vision_model") or is_causal_throughout(config):
        return {}
    images = module.get_block_sequence_ids_for_mask(is_image.long(), device=positions.device)
    shape_alone = torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device)
    places = torch.arange(positions.shape[1], device=positions.device).unsqueeze(0)
    document = (positions == 0).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    masks: dict[str, Tensor] = masks_of(config, dtype, positions, by_layer=True)
    of_one_document = module.create_masks_for_vision_model(config, shape_alone, None, None, places, images)
    return masks | {kind: mask & same for kind, mask in of_one_document.items() if mask is not None}


def is_causal_throughout(config: Any) -> bool:
    """Return True for a Gemma 4 with causal attention within images, as the small ones have."""
    return config.model_type.startswith("gemma4") and config.use_bidirectional_attention != "vision"


@contextmanager
def balance_of_real_tokens(model: Any, is_real: Tensor) -> Iterator[None]:
    """Make the auxiliary loss of a model's routers ignore padding, for which `is_real`, bool [B, T], is False.

    The models derive padding from their attention mask, but most get none here, and some a mask of another form.
    """
    module, name = import_module(type(model).__module__), "load_balancing_loss_func"
    original = getattr(module, name, None)
    if original is None:  # some configs have the field, but their models no such loss
        yield
        return

    def without_padding(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
        has_real = is_real.any()  # a mean over no tokens is not a number
        return has_real * original(gate_logits, num_experts, top_k, is_real | ~has_real)

    with patch.object(module, name, without_padding):
        yield


def axis_taps(*args: Any) -> tuple[Tensor, Tensor]:
    """Return entries and weights along an axis of a table of positions that is resized to an image's side."""
    taps: tuple[Tensor, Tensor] = import_module("transformers.vision_utils")._interpolation_axis_taps_weights(*args)
    return taps


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Let configs name a function of attention."""
    import_module("transformers").AttentionInterface.register(name, attention)


def conversion_of(model: Any) -> Conversion:
    """Return the conversion of a model that transformers built."""
    return parted(import_module("transformers.conversion_mapping").get_model_conversion_mapping(model))


def parted(entries: Sequence[Any]) -> Conversion:
    """Return the conversion that consists of these entries of transformers."""
    kind = import_module("transformers.core_model_loading").WeightConverter
    return Conversion([e for e in entries if not isinstance(e, kind)], [e for e in entries if isinstance(e, kind)])


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of stored tensors as transformers sorts them, numbers by value."""
    return sorted(names, key=import_module("transformers.core_model_loading").dot_natural_key)


def ignored(model: Any) -> list[str]:
    """Return patterns of stored names that a model ignores.

    Among them are buffers that it computes, also those that older versions had in each layer.
    """
    stored = model.state_dict()
    computed = [name.split(".")[-2:] for name, _ in model.named_buffers() if name not in stored]
    patterns = {rf"(^|\.){re.escape('.'.join(ending))}$" for ending in computed}
    further = model.mtp._keys_to_ignore_on_load_unexpected if hasattr(model, "mtp") else further_layers(model)
    return [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *further, *patterns]


def further_layers(model: Any) -> list[str]:
    """Return patterns of the stored names of multi-token prediction: layers after the last one of the model."""
    layers, further = (getattr(model.config, name, None) or 0 for name in ("num_hidden_layers", "num_mtp_layers"))
    return [rf"^model\.layers\.{number}\." for number in range(layers, layers + further)]


def add_further_layers(model: Any) -> None:
    """Give a model, as `model.mtp`, the layers of multi-token prediction that transformers keeps beside it.

    The embeddings, the head and the rotary embeddings that they use stay those of the model, under their names there.
    """
    further = import_module("transformers.modeling_layers").MtpModel(model, model.config.num_mtp_layers)
    for name in ("embed_tokens", "shared_head", "rotary_emb"):
        shared = getattr(further, name)
        vars(further)["_modules"].pop(name, None)
        object.__setattr__(further, name, shared)
    object.__setattr__(further, "_init_weights", model._init_weights)  # of whose kind its layers are
    model.mtp = further


def conversion_of_further_layers(model: Any) -> Conversion:
    """Return the conversion of the stored tensors of `model.mtp`."""
    return parted(model.mtp.get_weight_conversions(model))


def without_further_layers(model: Any) -> dict[str, Tensor]:
    """Take `model.mtp` off a model, and return its tensors by their stored names: as layers after the last one."""
    further, layers = vars(model)["_modules"].pop("mtp", None), model.config.num_hidden_layers
    if further is None:
        return {}
    starts = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    tensors = {}
    for name, tensor in further.state_dict().items():
        _, number, part = name.split(".", 2)
        start = next((start for start in starts if part.startswith(start)), "")
        tensors[f"model.layers.{layers + int(number)}.{starts.get(start, '')}{part.removeprefix(start)}"] = tensor
    return as_stored(model, tensors)


def as_stored(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, by the names that modules give them, as the files of a model have them."""
    return import_module("transformers.core_model_loading").revert_weight_conversion(model, tensors)


def absent(model: Any) -> list[str]:
    """Return patterns of names that a model's files need not have."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def initialize(model: Any, path: str) -> None:
    """Set the parameters of a model's module to their initial values.

    Modules around it follow, as in `PreTrainedModel.initialize_weights`, because they may set them, too. Each uses the
    method of the nearest transformers model.
    """
    parts = path.split(".") if path else []
    chain = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    for depth in reversed(range(len(chain))):
        next(m for m in chain[depth::-1] if hasattr(m, "_init_weights"))._init_weights(chain[depth])
