"""Further vision models of `transformers`: detectors, segmenters, video, and image-text models."""

from __future__ import annotations

from typing import Any

import torch

from tests.nightly.models.case import Batch, Entry, ids, normal
from tests.nightly.models.zoo.images import PATCHED, pixels, wide
from tests.nightly.models.zoo.media import READS, SEES, captioned, contrasted
from tests.nightly.models.zoo.transformer import VOCAB, WIDTH, image_entry

SPACE: dict[str, Any] = {"num_frames": 4, "tubelet_size": 2}


def video(generator: torch.Generator) -> Batch:
    """Return four frames of images with three channels."""
    return {"pixel_values": normal(generator, 3, 4, 3, 16, 16)}


def boxed(generator: torch.Generator) -> Batch:
    """Return tokens and their boxes on a page."""
    corners = torch.randint(0, 8, (3, 7, 2), generator=generator)
    return {"input_ids": ids(generator, VOCAB, 3, 7), "bbox": torch.cat([corners, corners + 3], -1)}


def regions(generator: torch.Generator) -> Batch:
    """Return tokens, and features of parts of an image."""
    return {"input_ids": ids(generator, VOCAB, 3, 7), "visual_embeds": normal(generator, 3, 5, 10)}


MODELS: list[Entry] = [
    image_entry("blip", "BlipModel", captioned, contrasted, text_config=READS | {"encoder_hidden_size": WIDTH},
                vision_config=SEES, projection_dim=10),
    image_entry("clipseg", "CLIPSegForImageSegmentation", captioned, text_config=READS, vision_config=SEES,
                projection_dim=WIDTH, extract_layers=[0, 1], reduce_dim=8, decoder_num_attention_heads=2,
                decoder_intermediate_size=16),
    image_entry("deit", "DeiTModel", pixels, **PATCHED),
    image_entry("dinov2", "Dinov2Model", pixels, **PATCHED, mlp_ratio=2),
    image_entry("efficientnet", "EfficientNetModel", wide, width_coefficient=0.2, depth_coefficient=0.2,
                hidden_dim=256),
    image_entry("git", "GitForCausalLM", captioned, **READS, vision_config=SEES),
    image_entry("hiera", "HieraModel", wide, image_size=[64, 64], embed_dim=8, depths=[1, 1, 1, 1],
                num_heads=[1, 1, 2, 2]),
    image_entry("layoutlm", "LayoutLMModel", boxed, **READS, max_2d_position_embeddings=16),
    image_entry("lilt", "LiltModel", boxed, **READS, channel_shrink_ratio=2, max_2d_position_embeddings=16),
    image_entry("mobilenet_v2", "MobileNetV2Model", wide, depth_multiplier=0.2),
    image_entry("owlvit", "OwlViTModel", captioned, contrasted, text_config=READS | {"max_position_embeddings": 7},
                vision_config=SEES, projection_dim=10),
    image_entry("poolformer", "PoolFormerModel", wide, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    image_entry("pvt_v2", "PvtV2Model", wide, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1],
                num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 1, 1]),
    image_entry("regnet", "RegNetModel", wide, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], groups_width=4),
    image_entry("sam_vision", "SamVisionModel", pixels, **PATCHED, output_channels=8, window_size=2, mlp_dim=40,
                global_attn_indexes=[1]),
    image_entry("swin2sr", "Swin2SRForImageSuperResolution", pixels, image_size=16, embed_dim=12, depths=[2],
                num_heads=[2], window_size=4, upscale=2, upsampler="pixelshuffle"),
    image_entry("timesformer", "TimesformerModel", video, **PATCHED, num_frames=4),
    image_entry("videomae", "VideoMAEModel", video, **PATCHED, **SPACE),
    image_entry("visual_bert", "VisualBertModel", regions, **READS, visual_embedding_dim=10),
    image_entry("vivit", "VivitModel", video, **{**PATCHED, "patch_size": None}, num_frames=4,
                tubelet_size=[2, 4, 4]),
    image_entry("vit", "ViTModel", pixels, **PATCHED),
    image_entry("yolos", "YolosModel", pixels, **{**PATCHED, "image_size": [16, 16]}, num_detection_tokens=5),
]  # fmt: skip
