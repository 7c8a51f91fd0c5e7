"""Further vision-language models of `transformers`, with small configs derived from their default ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from compiler_trainer.models.shrunk import shrunk
from tests.nightly.models.case import Batch, Case, Entry, batches
from tests.nightly.models.zoo import grids
from tests.nightly.models.zoo.vision import IMAGE, PATCH, SIZE, Inputs, conversation, flat, gridded, loss, sized

TOWER: dict[str, Any] = {"depth": 2, "num_hidden_layers": 2, "num_heads": 4, "num_attention_heads": 4, "patch_size": PATCH,
                         "num_key_value_heads": 4, "embed_dim": 32, "num_position_embeddings": 16}  # fmt: skip


def small(kind: str) -> Any:
    """Return a small config of a type of model, with images of SIZE x SIZE and patches of PATCH x PATCH."""
    config = shrunk(transformers.AutoConfig.for_model(kind))
    text, tower = config.get_text_config(), config.vision_config
    width = text.hidden_size
    sizes = {**TOWER, "image_size": SIZE, "out_hidden_size": width, "projection_dim": width}
    for name in sizes.keys() & vars(tower).keys():
        setattr(tower, name, [sizes[name]] * 2 if isinstance(getattr(tower, name), list | tuple) else sizes[name])
    if "deepstack_visual_indexes" in vars(tower):
        tower.deepstack_visual_indexes = [0]
    for name, value in list(vars(config).items()):
        if name.endswith(("token_id", "token_index")) and isinstance(value, int):
            setattr(config, name, IMAGE if name.startswith("image_token") else 0)
        elif name == "visual_indicator_token_ids":  # tokens with features of their own
            setattr(config, name, [2 + i for i in range(len(value))])
    rotary = getattr(text, "rope_parameters", None)
    if isinstance(rotary, dict) and hasattr(tower, "spatial_merge_size"):
        half = (getattr(text, "head_dim", None) or width // text.num_attention_heads) // 2
        rotary |= {"mrope_section": [half - 2 * (half // 4), half // 4, half // 4], "partial_rotary_factor": 1.0}
    return config


def model(kind: str) -> Any:
    """Return a small model of a type with random weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(small(kind))


def unturned(batch: Batch) -> dict[str, Any]:
    """Return patches and grids, for a model whose positions do not turn."""
    return {name: value for name, value in gridded(batch).items() if name != "position_ids"}


def patched(batch: Batch) -> dict[str, Any]:
    """Return patches of one frame [N, 3, PATCH, PATCH], their grids, which are constants, and positions."""
    images = batch["pixels"][:, :, :, 0].flatten(0, 1).unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    return gridded(batch) | {"pixel_values": images.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)}


def case(kind: str, per_image: int, inputs: Inputs) -> Case:
    """Build a model whose images have one size."""
    frames = (2,) if inputs in (gridded, unturned, patched) else ()
    data = partial(conversation, per_image=per_image, pixels=(3, *frames, SIZE, SIZE))
    return Case(model(kind), partial(loss, inputs), batches(data))


def case_of_any_size(kind: str) -> Case:
    """Build a model whose images have any sizes."""
    return Case(model(kind), grids.loss, batches(grids.of_any_size))


def sees(kind: str, per_image: int, inputs: Inputs) -> Entry:
    """A model whose images have `per_image` tokens."""
    return Entry(kind, "transformers", partial(case, kind, per_image, inputs), sequence=True)


MODELS = [
    *(Entry(kind, "transformers", partial(case_of_any_size, kind), sequence=True) for kind in ("cosmos3_omni", "glm46v", "glm4v_moe")),
    sees("deepseek_vl", 16, flat),
    sees("lfm3_vl", 4, unturned),
    sees("lighton_ocr", 4, sized),
    sees("ovis2", 16, flat),
    sees("paddleocr_vl", 4, patched),
    sees("pp_chart2table", 1, flat),
    sees("qwen3_omni_moe_thinker", 4, gridded),
    sees("video_llava", 16, flat),
]
