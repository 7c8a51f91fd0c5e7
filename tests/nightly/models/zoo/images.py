"""Vision models of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from tests.nightly.models.case import Batch, Entry, normal
from tests.nightly.models.zoo.transformer import WIDTH, image_entry

SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2,
"num_attention_heads": 4}
PATCHED: dict[str, Any] = SIZES | {"image_size": 16, "patch_size": 4}


def pixels(generator: torch.Generator, size: int = 16) -> Batch:
    """Return images with three channels."""
    return {"pixel_values": normal(generator, 3, 3, size, size)}


def wide(generator: torch.Generator) -> Batch:
    """Return larger images, for models that halve them often."""
    return pixels(generator, 64)


def masked(generator: torch.Generator) -> Batch:
    """Return images, and noise whose order selects the patches to mask."""
    return pixels(generator) | {"noise": torch.rand(3, 16, generator=generator)}


MODELS: list[Entry] = [
    image_entry("beit", "BeitModel", pixels, **PATCHED, use_relative_position_bias=True, layer_scale_init_value=0.1),
    image_entry("convnext", "ConvNextModel", pixels, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=4),
    image_entry("dinov3", "DINOv3ViTModel", pixels, **{**PATCHED, "num_attention_heads": 3},
                num_register_tokens=2, pos_embed_rescale=None),
    image_entry("dpt", "DPTForDepthEstimation", pixels, **PATCHED, backbone_out_indices=[0, 1], neck_hidden_sizes=[8,
                8],
                reassemble_factors=[1, 1], fusion_hidden_size=8, is_hybrid=False, head_in_index=-1),
    image_entry("focalnet", "FocalNetModel", pixels, image_size=16, patch_size=4, embed_dim=12, hidden_sizes=[12, 24],
                depths=[1, 1], focal_levels=[1, 1], focal_windows=[3, 3]),
    image_entry("levit", "LevitModel", wide, image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4],
                depths=[1, 1, 1], key_dim=[4, 4, 4], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2],
                down_ops=[["Subsample", 4, 2, 4, 2, 2], ["Subsample", 4, 3, 4, 2, 2]]),
    image_entry("mobilevit", "MobileViTModel", wide, image_size=64, hidden_sizes=[12, 16, 20], num_attention_heads=2,
                neck_hidden_sizes=[4, 8, 8, 12, 16, 20, 24], mlp_ratio=2.0),
    image_entry("segformer", "SegformerForSemanticSegmentation", wide, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1,
                1],
                num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, num_labels=5),
    image_entry("swinv2", "Swinv2Model", pixels, image_size=16, patch_size=2, embed_dim=12, depths=[2, 1],
                num_heads=[2, 3],
                window_size=4),
    image_entry("vit_mae", "ViTMAEModel", masked, **PATCHED, mask_ratio=0.5),
    image_entry("vitdet", "VitDetModel", pixels, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
                image_size=16,
                pretrain_image_size=16, patch_size=4, mlp_ratio=2, use_relative_position_embeddings=True, window_size=2,
                window_block_indices=[0]),
]  # fmt: skip
