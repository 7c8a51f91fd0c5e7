"""Ways to tell a transformers model which tokens of a sequence belong to one document.

Most models derive their masks from positions that restart at each document; others need the masks themselves, and
those with recurrences the starts of documents, too. `probes.py` finds the way that a model needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from compiler_trainer.models.transformers_private import masks_of

Inputs = dict[str, Any]


def by_positions(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """Return positions that restart at each document."""
    return {"position_ids": batch["positions"]}


def by_masks(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """Return these positions, and masks made from them for each kind of layer."""
    return by_positions(config, model, batch) | masks(config, model, batch, by_layer=True)


def by_mask(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """Return these positions, and one mask made from them for all layers."""
    return by_positions(config, model, batch) | masks(config, model, batch, by_layer=False)


def by_mask_alone(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """Return a mask, for models that take no positions or do not depend on them."""
    return masks(config, model, batch, by_layer=False)


def masks(config: Any, model: nn.Module, batch: Mapping[str, Tensor], by_layer: bool) -> Inputs:
    """Return the masks that transformers makes from positions."""
    dtype = next(model.parameters()).dtype
    return {"attention_mask": masks_of(config, dtype, batch["positions"], by_layer)}


Way = Callable[[Any, nn.Module, Mapping[str, Tensor]], Inputs]
UNTRIED = "untried"  # by positions, for a model that cannot be made small and tried
WAYS: dict[str, Way] = {
    "positions": by_positions,
    "masks": by_masks,
    "mask": by_mask,
    "mask alone": by_mask_alone,
    "starts": by_positions,
    "masks and starts": by_masks,
}
RESTARTING = ("starts", "masks and starts", UNTRIED)  # ways in which recurrences (`recurrences.py`) restart, too


def inputs_of(way: str, config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """Return the inputs of a model, next to tokens, that keep documents apart in the given way; none for `causal`."""
    return {} if way == "causal" else WAYS.get(way, by_positions)(config, model, batch)
