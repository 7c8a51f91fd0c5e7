"""Models of lucidrains' packages."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nightly.models.case import Batch, Case, Entry, batches
from tests.nightly.models.zoo.media import of_x, other, vectors
from tests.nightly.models.zoo.transformer import VOCAB, tokens

SIZES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 24}
PLAIN: dict[str, Any] = SIZES | {"depth": 2, "heads": 4, "mlp_dim": 40}


def spoken(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the logits at every position."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def x_transformer(kind: str, **options: Any) -> Case:
    """Build a language model of x-transformers with layers of type `kind`."""
    module = import_module("x_transformers")
    torch.manual_seed(0)
    layers = getattr(module, kind)(dim=24, depth=2, heads=4, attn_dim_head=6, **options)
    return Case(module.TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=layers), spoken,
    batches(tokens))


def x_entry(name: str, kind: str = "Decoder", **options: Any) -> Entry:
    """A language model of x-transformers."""
    return Entry(name, "x-transformers", partial(x_transformer, kind, **options), sequence=True)


def vit_entry(name: str, module: str, kind: str, size: int = 16, **options: Any) -> Entry:
    """A model of vit-pytorch."""
    return other(name, "vit-pytorch", f"vit_pytorch.{module}", kind, vectors(3, size, size), of_x, **options)


MODELS: list[Entry] = [
    x_entry("x_alibi", alibi_pos_bias=True),
    x_entry("x_decoder", rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True),
    x_entry("x_encoder", "Encoder", rel_pos_bias=True),
    x_entry("x_macaron", macaron=True, residual_attn=True, shift_tokens=1),
    x_entry("x_memory", attn_num_mem_kv=3, attn_on_attn=True),
    vit_entry("vit_cait", "cait", "CaiT", **PLAIN, cls_depth=1),
    vit_entry("vit_cct", "cct", "CCT", 16, stochastic_depth_rate=0.0, img_size=16, embedding_dim=24, n_conv_layers=1,
         kernel_size=3,
         num_layers=2,
         num_heads=4,
         mlp_ratio=2.0, num_classes=5),
    vit_entry("vit_cvt", "cvt", "CvT", 32, num_classes=5, s1_emb_dim=8, s1_mlp_mult=2, s2_emb_dim=12, s2_heads=2,
         s2_mlp_mult=2,
         s3_emb_dim=16, s3_heads=2, s3_depth=1, s3_mlp_mult=2),
    vit_entry("vit_maxvit", "max_vit", "MaxViT", 32, num_classes=5, dim_conv_stem=8, dim=8, dim_head=4, depth=(1, 1),
         window_size=4,
         mbconv_expansion_rate=2, mbconv_shrinkage_rate=0.25),
    vit_entry("vit_t2t", "t2t", "T2TViT", 16, image_size=16, num_classes=5, dim=24, depth=2, heads=4, mlp_dim=40,
         t2t_layers=((3, 2), (3, 2))),
    vit_entry("vit_twins", "twins_svt", "TwinsSVT", 32, num_classes=5, s1_emb_dim=8, s1_patch_size=4, s1_local_patch_size=4,
         s1_global_k=4, s1_depth=1, s2_emb_dim=12, s2_patch_size=2, s2_local_patch_size=4, s2_global_k=4, s2_depth=1,
         s3_emb_dim=16, s3_patch_size=1, s3_local_patch_size=2, s3_global_k=2, s3_depth=1, s4_emb_dim=16,
         s4_patch_size=1,
         s4_local_patch_size=2, s4_global_k=2, s4_depth=1),
    vit_entry("vit_xcit", "xcit", "XCiT", **PLAIN, cls_depth=1),
]  # fmt: skip
