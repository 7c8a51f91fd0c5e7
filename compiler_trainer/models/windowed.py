"""A small decoder for short pretraining runs: sliding windows, value embeddings, squared ReLU.

The shape is that of karpathy/autoresearch (https://github.com/karpathy/autoresearch): 50.3 million parameters at the
defaults. Shapes: B sequences, T tokens, D = `dim`, H heads of h features, V = `vocab_size`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.models.attention import rotate
from compiler_trainer.models.loss import widened

ROPE_THETA = 10_000.0
FULL_EVERY = 4  # every fourth layer and the last see the whole sequence
LOGIT_CAP = 15.0


class WindowedDecoder(nn.Module):
    """A decoder in which three of four layers attend to the last `window` tokens."""

    def __init__(
        self,
        vocab_size: int = 8192,
        dim: int = 512,
        n_layers: int = 8,
        head_dim: int = 128,
        window: int = 1024,
    ):
        super().__init__()
        self.head_dim, self.window = head_dim, window
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            Layer(
                vocab_size, dim, head_dim,
                is_full=(i + 1) % FULL_EVERY == 0 or i == n_layers - 1, has_values=i % 2 == (n_layers - 1) % 2,
            )
            for i in range(n_layers)
        )  # fmt: skip
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits [B, T, V] of int64 `tokens` [B, T] at int64 `positions` [B, T]."""
        x = embedded = normalize(self.tok_embeddings(tokens))
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=tokens.device) / self.head_dim
        angles = positions[..., None, None] * (ROPE_THETA**exponents).reciprocal()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = window_mask(tokens.shape[1], self.window, tokens.device)
        for layer in self.layers:
            x = layer(x, embedded, tokens, cos, sin, mask)
        logits = widened(self.output(normalize(x)))
        return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)


class Layer(nn.Module):
    """Attention and feed-forward with norms before them; the token embedding is added to the layer's input."""

    def __init__(self, vocab_size: int, dim: int, head_dim: int, is_full: bool, has_values: bool):
        super().__init__()
        self.head_dim, self.is_full = head_dim, is_full
        self.residual = nn.Parameter(torch.ones(()))
        self.embedded = nn.Parameter(torch.zeros(()))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.values = nn.Embedding(vocab_size, dim) if has_values else None

    def forward(self, x: Tensor, embedded: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = self.residual * x + self.embedded * embedded
        x = x + self.attend(normalize(x), tokens, cos, sin, mask)
        return x + self.w2(F.relu(self.w1(normalize(x))).square())

    def attend(self, x: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Return attention of `x` [B, T, D], causal, and within the window unless `is_full`."""
        heads = (*x.shape[:2], -1, self.head_dim)
        v = self.wv(x) if self.values is None else self.wv(x) + self.values(tokens)
        q, k = (normalize(rotate(weight(x).view(heads), cos, sin)).transpose(1, 2) for weight in (self.wq, self.wk))
        v = v.view(heads).transpose(1, 2)
        if self.is_full:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))


def normalize(x: Tensor) -> Tensor:
    """Divide by the root mean square of the last dim; there are no weights."""
    return F.rms_norm(x, (x.shape[-1],))


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask, bool [T, T], with which tokens see the last `window` tokens, themselves included."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


def initialize(module: nn.Module) -> None:
    """Draw matrices uniformly with the variance 1 / dim, embeddings normally; zero the outputs of a layer."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=1.0)
    elif isinstance(module, nn.Linear):
        bound = (3 / module.in_features) ** 0.5
        nn.init.uniform_(module.weight, -bound, bound)
    if isinstance(module, Layer):
        nn.init.zeros_(module.wo.weight)
        nn.init.zeros_(module.w2.weight)
