"""Attention of one layer: grouped-query attention or latent attention, and rotary positions.

Shapes: B sequences, T tokens, D = `dim`, H query heads of h features, K key-value heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from compiler_trainer.config.schema import LatentConfig, ModelConfig


class Attention(nn.Module):
    """Causal attention in which each of K key-value heads serves H / K query heads (arXiv:2305.13245).

    If it does not rotate (Llama 4's NoPE layers), order comes from the causal mask alone, and q and k have no norm.
    """

    def __init__(self, cfg: ModelConfig, rotates: bool = True):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.rotates = cfg.n_heads, cfg.n_kv_heads, rotates
        self.head_dim, _ = head_dims(cfg)
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(cfg.n_heads * self.head_dim, cfg.dim, bias=False)
        self.q_norm, self.k_norm = (head_norm(cfg, self.head_dim, rotates) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.wo(attend(q, k, v, mask))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are computed from few features.

    Some features of a head's query and key have rotary positions; those of the key are the same in all heads.
    """

    def __init__(self, cfg: ModelConfig, latent: LatentConfig):
        super().__init__()
        self.n_heads, self.latent = cfg.n_heads, latent
        q_features = cfg.n_heads * (latent.nope_dim + latent.rope_dim)
        self.wq: nn.Module = nn.Linear(cfg.dim, q_features, bias=False)
        if (rank := latent.q_rank) is not None:
            into, out = nn.Linear(cfg.dim, rank, bias=False), nn.Linear(rank, q_features, bias=False)
            self.wq = nn.Sequential(into, nn.RMSNorm(rank, eps=cfg.norm_eps), out)
        self.wkv_a = nn.Linear(cfg.dim, latent.kv_rank + latent.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank, eps=cfg.norm_eps)
        self.wkv_b = nn.Linear(latent.kv_rank, cfg.n_heads * (latent.nope_dim + latent.v_dim), bias=False)
        self.wo = nn.Linear(cfg.n_heads * latent.v_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        (b, t, _), sizes = x.shape, self.latent
        q = self.wq(x).view(b, t, self.n_heads, -1)
        q_still, q_turned = q.split([sizes.nope_dim, sizes.rope_dim], -1)
        kv, k_turned = self.wkv_a(x).split([sizes.kv_rank, sizes.rope_dim], -1)
        kv = self.wkv_b(self.kv_norm(kv)).view(b, t, self.n_heads, -1)
        k_still, v = kv.split([sizes.nope_dim, sizes.v_dim], -1)
        k_turned = rotate(k_turned.unsqueeze(2), cos, sin).expand(b, t, self.n_heads, sizes.rope_dim)
        q = torch.cat((q_still, rotate(q_turned, cos, sin)), -1)
        k = torch.cat((k_still, k_turned), -1)
        return self.wo(attend(q, k, v, mask))


def head_dims(cfg: ModelConfig) -> tuple[int, int]:
    """Return the number of features of a head's query and key, and of its value."""
    if cfg.latent is not None:
        return cfg.latent.nope_dim + cfg.latent.rope_dim, cfg.latent.v_dim
    head_dim = cfg.head_dim or cfg.dim // cfg.n_heads
    return head_dim, head_dim


def head_norm(cfg: ModelConfig, head_dim: int, rotates: bool) -> nn.RMSNorm | None:
    """Return the norm of each head's query or key, None if it has none."""
    if cfg.qk_norm == "none" or not rotates:
        return None
    return nn.RMSNorm(head_dim, eps=cfg.norm_eps, elementwise_affine=cfg.qk_norm == "learned")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
    """Return causal attention of q [B, T, H, h] over k and v [B, T, K, h], restricted by `mask`, as [B, T, H h]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = k.shape[1] != q.shape[1]
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)  # type: ignore[assignment]
    return out.transpose(1, 2).flatten(2)


def within_documents(documents: Tensor) -> BlockMask:
    """Return the mask with which tokens see only earlier tokens of their own document, int64 `documents` [B, T]."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    rows, size = documents.shape
    return create_block_mask(sees, rows, None, size, size, device=documents.device)


def rotary_tables(cfg: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, fp32 [B, T, 1, r/2], of the angles of r rotary features at int64 `positions` [B, T]."""
    # Computed from constants, so there is no buffer to place, no longest sequence and no table to shard.
    angles = positions[..., None, None] * inverse_frequencies(cfg, positions.device)
    return angles.cos(), angles.sin()


def inverse_frequencies(cfg: ModelConfig, device: torch.device) -> Tensor:
    """Return rotary inverse frequencies, fp32 [r/2], scaled as in Llama 3.1 if `cfg.rope_scaling` is set."""
    rotating = cfg.latent.rope_dim if cfg.latent is not None else head_dims(cfg)[0]
    exponents = torch.arange(0, rotating, 2, dtype=torch.float32, device=device) / rotating
    frequencies = (cfg.rope_theta**exponents).reciprocal()
    if (scaling := cfg.rope_scaling) is None:
        return frequencies
    # Turns within the original context: above `high` a frequency stays, below `low` it is divided by `factor`.
    turns = frequencies * (scaling.original_max_position / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x` [B, T, H, r]: feature i pairs with i + r/2, the rotate-half order of Hugging Face weights.

    Weights in Meta's or DeepSeek's interleaved order (2i pairs with 2i + 1) need the rows of the q and k weights
    permuted.
    """
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
