"""Ways to tell a model of transformers which tokens of a row are of one document.

Most models make their masks of positions that begin again; others take masks that are made so. Which way a model takes
`tried.py` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from compiler_trainer.models.transformers_private import masks_of

Inputs = dict[str, Any]


def by_positions(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """Positions that begin again at each document."""
    return {"position_ids": batch["positions"]}


def by_masks(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """The same, and masks made of them for each kind of layer."""
    return by_positions(config, model, batch) | masks(config, model, batch, by_layer=True)


def by_mask(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """The same, and one mask made of them for all layers."""
    return by_positions(config, model, batch) | masks(config, model, batch, by_layer=False)


def by_mask_alone(config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """A mask, for models whose position in a row does not matter or that take none."""
    return masks(config, model, batch, by_layer=False)


def masks(config: Any, model: nn.Module, batch: Mapping[str, Tensor], by_layer: bool) -> Inputs:
    """Masks as transformers makes them of positions."""
    dtype = next(model.parameters()).dtype
    return {"attention_mask": masks_of(config, dtype, batch["positions"], by_layer)}


Way = Callable[[Any, nn.Module, Mapping[str, Tensor]], Inputs]
UNTRIED = "untried"  # by positions, in a model that cannot be made small
WAYS: dict[str, Way] = {
    "positions": by_positions,
    "masks": by_masks,
    "mask": by_mask,
    "mask alone": by_mask_alone,
}


def inputs_of(way: str, config: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """The inputs of a model, next to tokens, that keep attention as `way` says; none of rows that are one text."""
    return {} if way == "causal" else WAYS.get(way, by_positions)(config, model, batch)
