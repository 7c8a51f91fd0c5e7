"""A decoder for one device: Llama, and with other options Mixtral, Qwen3, DeepSeek and Llama 4.

Shapes: B sequences, T tokens, D = `dim`, V = `vocab_size`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models.attention import Attention, LatentAttention, rotary_tables, within_documents
from compiler_trainer.models.experts import MixtureOfExperts
from compiler_trainer.models.feed_forward import FeedForward
from compiler_trainer.models.loss import PADDING_DOCUMENT, TrainingOutputs, ahead
from compiler_trainer.models.skeleton import skeleton


def build(cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> Llama:
    """Return the model with parameters of `dtype` on the meta device, where they take no memory, and real buffers."""
    return skeleton(lambda: Llama(cfg), dtype)


class Llama(nn.Module):
    """A Llama 3 decoder (arXiv:2407.21783), with experts or latent attention if `cfg` has them.

    Attention is causal over the whole sequence of T tokens or, with `cfg.attention` "documents", within each document
    of it, as Llama 3 was trained.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        further = range(cfg.n_layers, cfg.n_layers + (cfg.mtp.layers if cfg.mtp else 0))
        self.mtp = nn.ModuleList(FurtherTokens(cfg, i) for i in further)
        # Two names for one parameter would separate when a meta model gets memory, so a tied head has no module.
        self.output = None if cfg.tied else nn.Linear(cfg.dim, cfg.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None
    ) -> Tensor | TrainingOutputs:
        """Return logits [B, T, V] for int64 `tokens`, `positions` and document numbers `documents`, each [B, T].

        Document -1 is padding, which experts do not count.
        In training mode, with `cfg.experts.balance_loss` or `cfg.mtp`, return `TrainingOutputs`.
        """
        x = self.tok_embeddings(tokens)
        cos, sin = rotary_tables(self.cfg, positions)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        mask, balances = self.mask(documents), list[Tensor | None]()
        is_real = None if documents is None or self.cfg.experts is None else documents != PADDING_DOCUMENT
        for layer in self.layers:
            x, balance = layer(x, cos, sin, mask, is_real)
            balances.append(balance)
        head = self.tok_embeddings if self.output is None else self.output
        x = self.norm(x)
        logits, further = F.linear(x, head.weight), list[Tensor]()
        for k, module in enumerate(self.mtp if self.training else (), start=1):
            x, balance = module(x, self.tok_embeddings(ahead(tokens, k)), cos, sin, mask, is_real)
            further.append(F.linear(x, head.weight))
            balances.append(balance)
        total = total_of(balances)
        return TrainingOutputs(logits, total, tuple(further)) if further or total is not None else logits

    def mask(self, documents: Tensor | None) -> BlockMask | None:
        """Return the mask that attention needs in addition to causality, None if it needs no other."""
        if self.cfg.attention == "causal":
            return None
        assert documents is not None, "attention within documents needs their numbers"
        return within_documents(documents)

    def active_parameters(self) -> dict[str, int]:
        """Return the entries of each parameter that one token uses: all, or `top_k` of `count` for routed experts."""
        experts = self.cfg.experts
        return {
            name: p.numel() * experts.top_k // experts.count if experts and ".experts." in name else p.numel()
            for name, p in self.named_parameters()
        }


def total_of(balances: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the auxiliary losses, None if there are none; in order: only the next layer reads a layer."""
    total = None
    for balance in balances:
        if balance is not None:
            total = balance if total is None else total + balance
    return total


class Block(nn.Module):
    """Pre-norm layer `number`: attention, then feed-forward or experts, each added to the residual stream [B, T, D]."""

    def __init__(self, cfg: ModelConfig, number: int):
        super().__init__()
        rotates = cfg.nope_every is None or (number + 1) % cfg.nope_every != 0
        latent, experts = cfg.latent, cfg.experts
        self.attention: Attention | LatentAttention
        self.feed_forward: MixtureOfExperts | FeedForward
        self.attention = Attention(cfg, rotates) if latent is None else LatentAttention(cfg, latent)
        if experts is not None and experts.are_in(number):
            self.feed_forward = MixtureOfExperts(cfg.dim, experts)
        else:
            self.feed_forward = FeedForward(cfg.dim, cfg.ffn_dim)
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.ffn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None, is_real: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return [B, T, D], and the auxiliary loss of the experts, None if the layer has none."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        if isinstance(self.feed_forward, FeedForward):
            return x + self.feed_forward(self.ffn_norm(x)), None
        out, balance = self.feed_forward(self.ffn_norm(x), is_real)
        return x + out, balance


class FurtherTokens(nn.Module):
    """A layer of multi-token prediction: DeepSeek-V3's (arXiv:2412.19437, equations 21 to 23), shared head outside.

    It reads the state of each token, and the embedding of a later one. [B, T, D] each. States are those that the head
    reads, after a norm, as in transformers and vLLM.
    """

    def __init__(self, cfg: ModelConfig, number: int):
        super().__init__()
        self.state_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.embedding_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.projection = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)
        self.block = Block(cfg, number)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)

    def forward(
        self, x: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | None, is_real: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the state [B, T, D] for the head and the next such layer, and the auxiliary loss of the block."""
        both = torch.cat([self.embedding_norm(embedded), self.state_norm(x)], dim=-1)
        x, balance = self.block(self.projection(both), cos, sin, mask, is_real)
        return self.norm(x), balance
