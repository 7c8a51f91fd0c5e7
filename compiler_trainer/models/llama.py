"""Llama for one device: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

Shapes: B sequences, T tokens, D = `dim`, H query heads, K key-value heads, h = D / H, V = `vocab_size`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from compiler_trainer.config.schema import ModelConfig


class Llama(nn.Module):
    """Llama 3 decoder (arXiv:2407.21783).

    Attention is causal over the whole row of T tokens or, with `cfg.attention` "documents", within each document of
    it, as Llama 3 was trained.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        # Two names for one parameter would come apart when a meta model is given memory: a tied head has no module.
        self.output = None if cfg.tied else nn.Linear(cfg.dim, cfg.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of int64 `tokens` [B, T] standing at int64 `positions` of the `documents` numbered so."""
        x = self.tok_embeddings(tokens)
        cos, sin = rotary_tables(self.cfg, positions)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        mask = self.mask(documents)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        head = self.tok_embeddings if self.output is None else self.output
        return F.linear(self.norm(x), head.weight)

    def mask(self, documents: Tensor | None) -> BlockMask | None:
        """What attention is told to leave out, beside what comes later; None where that is all."""
        if self.cfg.attention == "causal":
            return None
        assert documents is not None, "attention within documents needs their numbers"
        return within_documents(documents)


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream [B, T, D]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attention = Attention(cfg)
        self.feed_forward = FeedForward(cfg)
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.ffn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal attention in which each of K key-value heads serves H / K query heads (arXiv:2305.13245)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads = cfg.n_heads, cfg.n_kv_heads
        self.head_dim = cfg.dim // cfg.n_heads
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(cfg.n_heads * self.head_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None) -> Tensor:
        b, t, _ = x.shape
        q = rotate(self.wq(x).view(b, t, self.n_heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = self.n_kv_heads != self.n_heads
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x) (arXiv:2002.05202)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w2 = nn.Linear(cfg.ffn_dim, cfg.dim, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def within_documents(documents: Tensor) -> BlockMask:
    """The mask of tokens that see those before them in their own document, int64 `documents` [B, T]."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    rows, size = documents.shape
    return create_block_mask(sees, rows, None, size, size, device=documents.device)


def rotary_tables(cfg: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, fp32 [B, T, 1, h/2], of the rotary angles at int64 `positions` [B, T]."""
    # Computed from constants, so the model has no buffer to place, no longest sequence and no table to shard.
    angles = positions[..., None, None] * inverse_frequencies(cfg, positions.device)
    return angles.cos(), angles.sin()


def inverse_frequencies(cfg: ModelConfig, device: torch.device) -> Tensor:
    """Rotary inverse frequencies, fp32 [h/2], stretched as in Llama 3.1 where `cfg.rope_scaling` is given."""
    head_dim = cfg.dim // cfg.n_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = (cfg.rope_theta**exponents).reciprocal()
    if (scaling := cfg.rope_scaling) is None:
        return frequencies
    # Turns within the original context: above `high` a frequency stays, below `low` it is divided by `factor`.
    turns = frequencies * (scaling.original_max_position / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x` [B, T, H, h]: feature i pairs with i + h/2, the rotate-half order of Hugging Face weights.

    Weights in Meta's interleaved order (2i pairs with 2i + 1) need the rows of wq and wk permuted first.
    """
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
