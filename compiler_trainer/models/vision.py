"""Vision-language models of transformers' folders: the model's inputs on rows with images, and its loss.

The arrays of images (`processor.py`) are entries of a batch, [B, images of a row, ...]. Tables of sizes and grids are
the same for all images, and thus constants of the graph.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.models import folder
from compiler_trainer.models.by_row import ByRow
from compiler_trainer.models.documents import inputs_of
from compiler_trainer.models.grids import TABLE, Grids, turning_positions
from compiler_trainer.models.loss import cross_entropy
from compiler_trainer.models.processor import PIXELS, Processor
from compiler_trainer.models.transformers_private import masks_with_images

UNCHECKED = {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}  # as many features as image tokens: rows may have fewer images


@dataclass(frozen=True)
class View:
    """The images of a row: the arrays' names, and the tables of sizes of an image; with `nested`, a row has a dim.

    `token_id` is that of image tokens. With `grids`, a row has patches and a table instead (`grids.py`).
    """

    arrays: tuple[str, ...]
    sizes: Mapping[str, list[Any]]
    nested: bool
    token_id: int
    grids: bool


def view_of(model: Any, processor: Processor) -> View:
    """Return how a model sees the images of a processor.

    Raises UserError if images are no features at tokens of the text, or its loss has terms that we do not have.
    """
    config = model.config
    if not hasattr(model, "model") or not isinstance(getattr(config, "image_token_id", None), int):
        problem = f"is of a {config.model_type}, in which images are no features in place of tokens"
        raise UserError("model.path", f"{problem}; leave data.images_per_row at 0, or use another model")
    if getattr(config.get_text_config(), "output_router_logits", False):
        problem = "its config.json asks for an auxiliary loss of routers (output_router_logits)"
        raise UserError("data.images_per_row", f"{problem}, which is not trained with images; set it to false")
    names = inspect.signature(model.forward).parameters
    blank = processor.blank
    return View(
        tuple(name for name in blank.arrays if name in names),
        {name: table for name, table in blank.sizes.items() if name in names},
        blank.arrays[PIXELS].ndim == 5 and "image_sizes" not in blank.sizes,  # otherwise tiles of an image
        config.image_token_id,
        processor.merge is not None,
    )


def outputs(view: View, way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Return all outputs of the model for a batch with the view's arrays, each [B, images, ...], or without images."""
    if PIXELS not in batch:
        return folder.outputs(way, model, batch)
    tokens, seeing = batch["tokens"], folder.plain(model)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, UNCHECKED))
        mode = stack.enter_context(ByRow(len(tokens), batch[PIXELS]))
        stack.enter_context(folder.recurrences_with_starts(way, batch))
        inputs = inputs_of(way, seeing.config.get_text_config(), model, batch)
        if view.grids:
            grids = Grids(batch[TABLE], batch[PIXELS].shape[1], seeing.config.vision_config.spatial_merge_size, mode)
            stack.enter_context(grids.by_row(seeing))
            inputs |= {PIXELS: batch[PIXELS].flatten(0, 1), TABLE: grids.as_one_image}
        else:
            inputs |= images_of(view, batch)
        is_image = tokens == view.token_id
        names = inspect.signature(seeing.forward).parameters
        for name in ("token_type_ids", "mm_token_type_ids"):  # in some, images attend within themselves both ways
            inputs |= {name: is_image.long()} if name in names else {}
        if way != "causal":  # with which a sequence is one text, as transformers takes it
            masks = masks_with_images(seeing, next(model.parameters()).dtype, batch["positions"], is_image)
            inputs |= {"attention_mask": masks} if masks else {}
        if hasattr(seeing.model, "get_rope_index"):
            table = batch[TABLE] if view.grids else inputs[TABLE].view(len(tokens), -1, 3)
            merge = seeing.config.vision_config.spatial_merge_size
            inputs["position_ids"] = turning_positions(table, merge, is_image, batch["positions"])
        return model(input_ids=tokens, use_cache=False, **inputs)


def images_of(view: View, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's inputs of images: of all rows, one after another, or by row if the view is nested."""
    inputs: dict[str, Any] = {}
    for name in view.arrays:
        inputs[name] = batch[name].flatten(1, 3) if view.nested else batch[name].flatten(0, 2)
    count = batch[PIXELS].shape[0] * batch[PIXELS].shape[1]
    return inputs | {name: torch.tensor([table] * count) for name, table in view.sizes.items()}


def logits(view: View, way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return logits [B, T, V]."""
    return outputs(view, way, model, batch).logits


def loss_of(view: View, way: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the labels, as `cross_entropy`."""
    return cross_entropy(logits(view, way, model, batch), batch["labels"])
