"""Models of timm, by class or by timm's own name."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.nightly.models.case import Case, Entry, batches
from tests.nightly.models.zoo.media import of_x, vectors

PATCHED: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}


def created(name: str, size: int, **options: Any) -> Case:
    """Build a model by timm's name, with other sizes."""
    torch.manual_seed(0)
    model = import_module("timm").create_model(name, pretrained=False, num_classes=5, **options)
    return Case(model, of_x, batches(vectors(3, size, size)))


def built(module: str, kind: str, size: int, **options: Any) -> Case:
    """Build a model by its class in timm."""
    torch.manual_seed(0)
    model = getattr(import_module(f"timm.models.{module}"), kind)(num_classes=5, **options)
    return Case(model, of_x, batches(vectors(3, size, size)))


def of_class(name: str, module: str, kind: str, size: int = 16, **options: Any) -> Entry:
    """A model of timm by its class."""
    return Entry(f"timm_{name}", "timm", partial(built, module, kind, size, **options))


def entry(name: str, size: int = 32, **options: Any) -> Entry:
    """A model of timm."""
    return Entry(f"timm_{name}", "timm", partial(created, name, size, **options))


MODELS: list[Entry] = [
    entry("cait_xxs24_224", 16, **PATCHED),
    entry("convnext_atto", 32, dims=(8, 8, 12, 12), depths=(1, 1, 1, 1)),
    entry("edgenext_xx_small", 64, dims=(8, 8, 12, 16), depths=(1, 1, 1, 2), heads=(2, 2, 2, 2)),
    entry("hiera_tiny_224", 32, img_size=(32, 32), embed_dim=8, num_heads=1, stages=(1, 1, 1), q_pool=1),
    entry("resnet10t", 32),
    entry("swin_tiny_patch4_window7_224", 32, img_size=32, patch_size=2, embed_dim=12, depths=(2, 1), num_heads=(2, 3),
          window_size=4, drop_path_rate=0.0),
    entry("tnt_s_patch16_224", 32, img_size=32, embed_dim=24, inner_dim=8, depth=2, num_heads_inner=2,
          num_heads_outer=4),
    of_class("densenet", "densenet", "DenseNet", 32, growth_rate=4, block_config=(2, 2)),
    of_class("eva", "eva", "Eva", **{**PATCHED, "num_heads": 3}, use_rot_pos_emb=True, swiglu_mlp=True,
             qkv_fused=False),
    of_class("mixer", "mlp_mixer", "MlpMixer", img_size=16, patch_size=4, embed_dim=24, num_blocks=2),
    of_class("metaformer", "metaformer", "MetaFormer", 32, depths=(1, 1, 1, 1), dims=(8, 8, 12, 12)),
    of_class("nest", "nest", "Nest", 32, drop_path_rate=0.0,
             img_size=32, patch_size=4, num_levels=2, embed_dims=(12, 24), num_heads=(2, 4),
             depths=(1, 1)),
    of_class("xcit", "xcit", "Xcit", 16, img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=4, eta=1.0),
]  # fmt: skip
