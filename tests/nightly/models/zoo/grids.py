"""Vision-language models of `transformers` whose images have any sizes: rows of patches, and tables of grids.

Eager PyTorch runs a model as transformers wrote it, on the patches of the images alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.models.by_row import ByRow
from compiler_trainer.models.grids import TABLE, fill_table
from compiler_trainer.models.processor import PIXELS
from compiler_trainer.models.vision import UNCHECKED, View, outputs
from passes.torch_private import FakeTensor
from tests.nightly.architectures.tiny import tiny
from tests.nightly.models.case import ROWS, Batch, Case, Entry, batches, ids, normal
from tests.nightly.models.zoo.transformer import make
from tests.nightly.models.zoo.vision import IMAGE, IMAGES, LAYERS, LENGTH, PATCH, SIZE, in_grids, turned

MERGE, PATCHES = 2, 64  # patches of a token along a side, and of a row
GRIDS: list[list[tuple[int, int, int]]] = [[(1, 4, 6), (1, 8, 4)], [(1, 4, 4)], [(1, 6, 4), (1, 4, 4)]]
NARROW = 32  # sizes of `tiny`


def of_any_size(generator: torch.Generator) -> Batch:
    """Return rows of patches with one or two images each, of different sizes, and tables of their grids."""
    tokens, labels = ids(generator, IMAGE, ROWS, LENGTH), ids(generator, IMAGE, ROWS, LENGTH)
    tables = []
    for row in range(ROWS):
        grids = GRIDS[int(torch.randint(len(GRIDS), (), generator=generator))]
        for start, (_, height, width) in zip((row, LENGTH // 2 + row), grids):
            tokens[row, start : start + height * width // MERGE**2] = IMAGE
        tables.append(torch.from_numpy(fill_table(grids, IMAGES, PATCHES, MERGE)))
    return {
        "tokens": tokens,
        "labels": labels.masked_fill(tokens == IMAGE, -100),
        "positions": torch.arange(LENGTH).expand(ROWS, -1).contiguous(),
        PIXELS: normal(generator, ROWS, PATCHES, 3 * 2 * PATCH**2),
        TABLE: torch.stack(tables),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    if isinstance(batch["tokens"], FakeTensor):
        view = View((PIXELS,), {}, nested=False, token_id=IMAGE, grids=True)
        logits = outputs(view, "causal", model, batch).logits
    else:
        images = [table[table[:, 1:].amin(1) > MERGE] for table in batch[TABLE]]  # patches of no image have smaller grids
        patches = [row[: int(grids.prod(-1).sum())] for row, grids in zip(batch[PIXELS], images)]
        logits = model(
            input_ids=batch["tokens"],
            pixel_values=torch.cat(patches),
            image_grid_thw=torch.cat(images),
            mm_token_type_ids=(batch["tokens"] == IMAGE).long(),
            use_cache=False,
        ).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def padded(generator: torch.Generator) -> Batch:
    """Return rows with two images of different sizes, whose patches end with padding."""
    batch = of_any_size(generator)
    tokens, patches = ids(generator, IMAGE, ROWS, LENGTH), 4 * MERGE**2
    places = torch.full((ROWS, IMAGES, patches, 2), -1)
    for row in range(ROWS):
        for image, start in enumerate((row, LENGTH // 2 + row)):
            height, width = [(4, 4), (2, 4), (4, 2), (2, 6)][(row + image) % 4]
            tokens[row, start : start + height * width // MERGE**2] = IMAGE
            across, down = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
            places[row, image, : height * width] = torch.stack([across, down], -1).reshape(-1, 2)
    pixels = torch.rand(ROWS, IMAGES, patches, 3 * PATCH**2, generator=generator)
    return batch | {"tokens": tokens, PIXELS: pixels * (places[..., :1] >= 0), "image_position_ids": places}


def loss_of_padded(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the next tokens, of images with padding."""
    is_captured = isinstance(batch["tokens"], FakeTensor)
    with ByRow(ROWS, batch[PIXELS]) if is_captured else nullcontext(), patch.dict(os.environ, UNCHECKED):
        logits = model(
            input_ids=batch["tokens"],
            pixel_values=batch[PIXELS].flatten(0, 1),
            image_position_ids=batch["image_position_ids"].flatten(0, 1),
            mm_token_type_ids=(batch["tokens"] == IMAGE).long(),
            use_cache=False,
        ).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def gemma4() -> Case:
    """Build a Gemma 4 without audio."""
    tower = {**LAYERS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
             "pooling_kernel_size": MERGE, "patch_size": PATCH, "position_embedding_size": 16}  # fmt: skip
    text = tiny("gemma4_text").to_dict() | {"use_bidirectional_attention": "vision"}
    sizes = {"text_config": text, "vision_config": tower, "audio_config": None, "image_token_id": IMAGE}
    return Case(make("Gemma4ForConditionalGeneration", **sizes), loss_of_padded, batches(padded))


def sees(name: str, model: str, text: Callable[[], dict[str, Any]], vision: dict[str, Any]) -> Entry:
    """Return an entry of a model."""

    def build() -> Case:
        sizes = {"text_config": text(), "vision_config": vision, "image_token_id": IMAGE, "video_token_id": 0}
        return Case(make(f"{model}ForConditionalGeneration", **sizes), loss, batches(of_any_size))

    return Entry(name, "transformers", build, sequence=True)


def decoder(kind: str, **rotary: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the small config of a decoder; `rotary` changes its positions."""

    def config() -> dict[str, Any]:
        return tiny(kind).to_dict() | ({"rope_parameters": {**TURNING, **rotary}} if rotary else {})

    return config


TURNING = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
WINDOWS: dict[str, Any] = {"fullatt_block_indexes": [1], "window_size": 16}
TABLES: dict[str, Any] = {"num_position_embeddings": 16}
DEEP: dict[str, Any] = {**TABLES, "deepstack_visual_indexes": [0]}
WHOLE = {"partial_rotary_factor": 1.0}

MODELS = [
    sees("cohere_compass", "CohereCompass", decoder("cohere_compass_text"), in_grids(out_hidden_size=NARROW, **DEEP)),
    sees("exaone4_5", "Exaone4_5_", decoder("exaone4"),
         in_grids(out_hidden_size=NARROW, num_key_value_heads=2, **WINDOWS)),
    Entry("gemma4_vision", "transformers", gemma4, sequence=True),
    sees("glm4v", "Glm4v", lambda: turned(rotary={"partial_rotary_factor": 1.0}), in_grids(image_size=SIZE)),
    sees("glm5_next", "Glm5Next", decoder("glm5_next_text"), in_grids(out_hidden_size=NARROW, image_size=SIZE)),
    sees("glm_ocr", "GlmOcr", decoder("glm_ocr_text", **WHOLE), in_grids(out_hidden_size=NARROW, image_size=SIZE)),
    sees("qwen2_vl", "Qwen2VL", turned, in_grids(embed_dim=24, mlp_ratio=2)),
    sees("qwen2_5_vl", "Qwen2_5_VL", turned, in_grids(**WINDOWS)),
    sees("qwen3_vl", "Qwen3VL", lambda: turned(head_dim=8, rotary={"mrope_section": [2, 1, 1]}), in_grids(**DEEP)),
    sees("qwen3_vl_moe", "Qwen3VLMoe", decoder("qwen3_vl_moe_text", **WHOLE), in_grids(out_hidden_size=NARROW, **DEEP)),
    sees("qwen3_5_vl", "Qwen3_5", decoder("qwen3_5_text", **WHOLE), in_grids(out_hidden_size=NARROW, **TABLES)),
    sees("qwen3_5_moe_vl", "Qwen3_5Moe", decoder("qwen3_5_moe_text", **WHOLE),
         in_grids(out_hidden_size=NARROW, **TABLES)),
    sees("qwen4_exp_vl", "Qwen4Exp", decoder("qwen4_exp_text", **WHOLE), in_grids(out_hidden_size=NARROW, **TABLES)),
]  # fmt: skip
