"""Models of images and volumes of monai, segment-anything and small packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches, ids, normal, squares
from tests.nightly.models.zoo.media import of_x, other, vectors
from tests.nightly.models.zoo.transformer import VOCAB, WIDTH


def volume(name: str, kind: str, **options: Any) -> Entry:
    """A model of monai from volumes to volumes."""
    arguments = {"in_channels": 1, "out_channels": 2, **options}
    return other(f"monai_{name}", "monai", "monai.networks.nets", kind, vectors(1, 16, 16, 16), of_x, **arguments)


def noised(generator: torch.Generator) -> Batch:
    """Return images and times."""
    times = torch.randint(0, 100, (3,), generator=generator)
    return {"x": normal(generator, 3, 3, 16, 16), "t": times}


def denoised(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model of images and times."""
    return squares(model(batch["x"], batch["t"]))


def captioned(generator: torch.Generator) -> Batch:
    """Return images, and tokens without padding."""
    return {"image": normal(generator, 3, 3, 16, 16), "text": ids(generator, VOCAB, 3, 8)}


def paired(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of images against texts."""
    logits, _ = model(batch["image"], batch["text"])
    return nn.functional.cross_entropy(logits, torch.arange(3))


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's own loss of texts against images."""
    return model(batch["text"], batch["image"], return_loss=True)


def efficient() -> Case:
    """Build the smallest EfficientNet, narrow and without dropped paths."""
    module = import_module("efficientnet_pytorch")
    torch.manual_seed(0)
    model = module.EfficientNet.from_name("efficientnet-b0", width_coefficient=0.2, depth_coefficient=0.2,
                                          num_classes=5, image_size=32, drop_connect_rate=0.0, dropout_rate=0.0)
    return Case(model, of_x, batches(vectors(3, 32, 32)))


MODELS: list[Entry] = [
    volume("unet", "UNet", spatial_dims=3, channels=(4, 8), strides=(2,), num_res_units=1),
    volume("unetr", "UNETR", img_size=16, feature_size=4, hidden_size=WIDTH, mlp_dim=40, num_heads=4),
    volume("segresnet", "SegResNet", blocks_down=(1, 1), blocks_up=(1,), init_filters=8, num_groups=4),
    other("monai_swin_unetr", "monai", "monai.networks.nets", "SwinUNETR", vectors(1, 64, 64), of_x, spatial_dims=2,
          in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), window_size=2),
    volume("attention_unet", "AttentionUnet", spatial_dims=3, channels=(4, 8), strides=(2,)),
    other("sam_encoder", "segment-anything", "segment_anything.modeling", "ImageEncoderViT", vectors(3, 16, 16), of_x,
          img_size=16, patch_size=4, embed_dim=WIDTH, depth=2, num_heads=4, out_chans=8, use_rel_pos=True,
          window_size=2, global_attn_indexes=(1,)),
    other("clip_anytorch", "clip-anytorch", "clip.model", "CLIP", captioned, paired, 16, 16, 2, 64, 4, 8, VOCAB, 24, 4,
          2),
    other("x_clip", "x-clip", "x_clip", "CLIP", captioned, own_loss, dim_text=WIDTH, dim_image=WIDTH, dim_latent=16,
          num_text_tokens=VOCAB, text_enc_depth=2, text_seq_len=8, text_heads=4, text_dim_head=6, visual_enc_depth=2,
          visual_heads=4, visual_dim_head=6, visual_image_size=16, visual_patch_size=4, visual_patch_dropout=0.0),
    other("ddpm_unet", "denoising-diffusion-pytorch", "denoising_diffusion_pytorch", "Unet", noised, denoised, 8,
          dim_mults=(1, 2), attn_heads=2, attn_dim_head=4),
    other("x_unet", "x-unet", "x_unet", "XUnet", vectors(3, 16, 16), of_x, 8, dim_mults=(1, 2),
          num_blocks_per_stage=(1, 1), num_self_attn_per_stage=(0, 1), nested_unet_depths=(1, 0), nested_unet_dim=8,
          attn_heads=2, attn_dim_head=4),
    other("axial_attention", "axial-attention", "axial_attention", "AxialAttention", vectors(8, 6, 6), of_x, dim=8,
          dim_index=1, heads=2, num_dimensions=2),
    other("perceiver", "perceiver-pytorch", "perceiver_pytorch", "Perceiver", vectors(6, 6, 3), of_x,
          num_freq_bands=2, depth=2, max_freq=4.0, num_latents=6, latent_dim=16, latent_heads=2, cross_dim_head=8,
          latent_dim_head=8, num_classes=5),
    other("gmlp_vision", "g-mlp-pytorch", "g_mlp_pytorch", "gMLPVision", vectors(3, 16, 16), of_x, image_size=16,
          patch_size=4, num_classes=5, dim=16, depth=2),
    other("mlp_mixer", "mlp-mixer-pytorch", "mlp_mixer_pytorch", "MLPMixer", vectors(3, 16, 16), of_x, image_size=16,
          channels=3, patch_size=4, dim=16, depth=2, num_classes=5),
    other("lambda_layer", "lambda-networks", "lambda_networks", "LambdaLayer", vectors(8, 6, 6), of_x, 8, dim_out=8,
          r=3, dim_k=4, heads=2, dim_u=1),
    Entry("efficientnet_pytorch", "efficientnet-pytorch", efficient),
]  # fmt: skip
