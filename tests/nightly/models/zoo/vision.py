"""Vision-language models of `transformers`: rows of text with two images each; tower, projector and decoder train.

Eager PyTorch runs a model as transformers wrote it, and the capture inside `ByRow`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.models.by_row import ByRow
from passes.torch_private import FakeTensor
from tests.nightly.models.case import ROWS, Batch, Case, Entry, batches, ids, normal
from tests.nightly.models.zoo.transformer import GROUPED, TOKENS, VOCAB, WIDTH, make

IMAGE, LENGTH, IMAGES, SIZE, PATCH = VOCAB - 1, 40, 2, 16, 4  # the id of image tokens; SIZE, PATCH in pixels
SIDE = SIZE // PATCH
LAYERS: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 40}
SEES: dict[str, Any] = {**LAYERS, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIZE,
"patch_size": PATCH}
CLIP, SIGLIP = ({"model_type": f"{kind}_vision_model", **SEES} for kind in ("clip", "siglip"))
PIXTRAL: dict[str, Any] = {"model_type": "pixtral", **SEES, "head_dim": 6}
Inputs = Callable[[Batch], dict[str, Any]]  # the model's inputs next to tokens


def text(kind: str | None, **sizes: Any) -> dict[str, Any]:
    """Return the config of a decoder."""
    return {**({"model_type": kind} if kind else {}), **GROUPED, **TOKENS, **sizes}


# ---- data --------------------------------------------------------------------------------------------


def conversation(generator: torch.Generator, per_image: int, pixels: tuple[int, ...]) -> Batch:
    """Return tokens with images of `per_image` tokens each at different places, `pixels` of each, and labels."""
    tokens, labels = ids(generator, IMAGE, ROWS, LENGTH), ids(generator, IMAGE, ROWS, LENGTH)
    for row in range(ROWS):
        for start in range(row, LENGTH, LENGTH // IMAGES):
            tokens[row, start : start + per_image] = IMAGE
    is_image = tokens == IMAGE
    return {
        "tokens": tokens,
        "labels": labels.masked_fill(is_image, -100),
        "positions": torch.randint(0, LENGTH, (ROWS, 3, LENGTH), generator=generator),  # in time, height and width
        "types": is_image.long(),
        "pixels": normal(generator, ROWS, IMAGES, *pixels),
    }


def flat(batch: Batch) -> dict[str, Any]:
    """Return the images of all rows, one after another."""
    return {"pixel_values": batch["pixels"].flatten(0, 1)}


def typed(batch: Batch) -> dict[str, Any]:
    """Return the images, and the types of tokens, for attention within images in both directions."""
    return flat(batch) | {"token_type_ids": batch["types"]}


def nested(batch: Batch) -> dict[str, Any]:
    """Return the images by row, and masks of their pixels."""
    pixels = batch["pixels"]
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, :, 0], dtype=torch.int64)}


def sized(batch: Batch) -> dict[str, Any]:
    """Return the images, and their sizes, which are constants."""
    return flat(batch) | {"image_sizes": torch.tensor([[SIZE, SIZE]] * (ROWS * IMAGES))}


def tiled(batch: Batch) -> dict[str, Any]:
    """Return the images, each in three tiles, and their sizes, which are constants."""
    tiles = batch["pixels"].flatten(0, 1).unsqueeze(1) * torch.tensor([1.0, 0.5, -1.0]).view(1, 3, 1, 1, 1)
    return {"pixel_values": tiles.to(batch["pixels"].dtype), "image_sizes": torch.tensor([[SIZE, 2 * SIZE]] * len(tiles))}


def gridded(batch: Batch) -> dict[str, Any]:
    """Return the patches of all images, [N, numbers of a patch], their grids, which are constants, and positions."""
    count = ROWS * IMAGES
    patches = {"pixel_values": batch["pixels"].reshape(count * SIDE**2, -1)}
    return patches | {
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * count),
        "position_ids": batch["positions"].movedim(1, 0),
    }


def loss(inputs: Inputs, model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    is_captured = isinstance(batch["tokens"], FakeTensor)
    with ByRow(ROWS, batch["pixels"]) if is_captured else nullcontext():
        logits = model(input_ids=batch["tokens"], **inputs(batch), use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


# ---- models ------------------------------------------------------------------------------------------


def case(model: str, per_image: int, inputs: Inputs, pixels: tuple[int, ...], sizes: dict[str, Any]) -> Case:
    """Build a model with its data."""
    data = partial(conversation, per_image=per_image, pixels=pixels)
    return Case(make(f"{model}ForConditionalGeneration", **sizes), partial(loss, inputs), batches(data))


def seeing(
    name: str, model: str, per_image: int, inputs: Inputs, text: Any, vision: Any, by: str = "image_token_id", **sizes: Any
) -> Entry:
    """A model whose images have `per_image` tokens, with the id in the config's field `by`."""
    pixels = (3, 2, SIZE, SIZE) if inputs is gridded else (3, SIZE, SIZE)  # two frames for a patch in time
    sizes = {by: IMAGE, "text_config": text, "vision_config": vision, **sizes}
    return Entry(name, "transformers", partial(case, model, per_image, inputs, pixels, sizes), sequence=True)


def turned(**sizes: Any) -> dict[str, Any]:
    """Return the config of a decoder with rotary positions in time, height and width."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], **sizes.pop("rotary", {})}
    return text(None, rope_parameters=rotary, **sizes)


def in_grids(**sizes: Any) -> dict[str, Any]:
    """Return the config of a tower that takes patches."""
    return {**LAYERS, "depth": 2, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": WIDTH, **sizes}


INDEX = "image_token_index"
MODELS = [
    seeing("aya_vision", "AyaVision", 4, flat, text("cohere2", head_dim=6), SIGLIP, INDEX, downsample_factor=2),
    seeing("cohere2_vision", "Cohere2Vision", 4, flat, text("cohere2", head_dim=6), SIGLIP, downsample_factor=2,
           alignment_intermediate_size=48),
    seeing("gemma3_vision", "Gemma3", 4, typed, text(None, head_dim=6, sliding_window=5), SIGLIP, INDEX,
           mm_tokens_per_image=4),
    seeing("got_ocr2", "GotOcr2", 1, flat, text("qwen2"), {**SEES, "global_attn_indexes": [1], "window_size": 2,
           "mlp_dim": 40, "output_channels": 8}, INDEX),
    seeing("idefics3", "Idefics3", 4, nested, text("llama"), SEES, scale_factor=2),
    seeing("internvl", "InternVL", 4, flat, text("qwen2"), {**SEES, "image_size": [SIZE] * 2,
           "patch_size": [PATCH] * 2}, image_seq_length=4),
    seeing("llama4_vision", "Llama4", 4, flat, text(None, head_dim=8, intermediate_size_mlp=40, num_local_experts=4,
           num_experts_per_tok=1, attention_chunk_size=16), {**SEES, "hidden_size": 32, "intermediate_size": 128,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "projector_input_dim": 16,
           "projector_output_dim": 16, "vision_output_dim": 16, "pixel_shuffle_ratio": 0.5}, INDEX),
    seeing("llava_by_row", "Llava", 16, flat, text("llama"), CLIP, INDEX, vision_feature_layer=-1),
    seeing("llava_next", "LlavaNext", 14, tiled, text("llama"), {**CLIP, "patch_size": 8}, INDEX, vision_feature_layer=-1,
           image_grid_pinpoints=[[SIZE, 2 * SIZE], [2 * SIZE, SIZE]]),
    seeing("llava_onevision", "LlavaOnevision", 14, tiled, text("qwen2"), {**SIGLIP, "patch_size": 8}, INDEX, vision_feature_layer=-1,
           image_grid_pinpoints=[[SIZE, 2 * SIZE], [2 * SIZE, SIZE]]),
    seeing("llava_pixtral", "Llava", 16, sized, text("llama"), PIXTRAL, INDEX, vision_feature_layer=-1,
           vision_feature_select_strategy="full"),
    seeing("mistral3", "Mistral3", 4, sized, text("mistral", head_dim=6), PIXTRAL, INDEX),
    seeing("paligemma", "PaliGemma", 16, typed, text("gemma", head_dim=6), SIGLIP, INDEX, projection_dim=WIDTH),
    seeing("smolvlm", "SmolVLM", 4, nested, text("llama"), SEES, scale_factor=2),
    seeing("vipllava", "VipLlava", 16, flat, text("llama"), CLIP, INDEX, vision_feature_layers=[-1, -2]),
]  # fmt: skip
