"""Sequence models that differ from our decoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.parity.subject import Batch, Terms
from tests.nightly.parity.models.kind import MEANS, VOCAB, Kind, mean_over, normal, token_batch

WIDTH, HEADS = 12, 4
LABELS: dict[str, tuple[Any, ...]] = {"loss": MEANS, "labels": ("some", "all", "uneven")}


def terms(loss: str = "mean", **_: Any) -> Terms:
    return lambda model, batch: (mean_over(model(batch["tokens"], batch["positions"]), batch["labels"], loss), None)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """Reshape [B, T, D] to [B, H, T, D / H]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Reader(nn.Module):
    """Sums over the past, weighted by a buffer of decays, and a head tied to the embedding."""

    decays: Tensor

    def __init__(self, **_: Any):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("decays", torch.linspace(0.5, 0.9, WIDTH))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        return self.head(torch.tanh(self.mix((x * self.decays ** (positions[..., None] % 4)).cumsum(1))))


class Encoder(nn.Module):
    """Post-norm layers with biases that attend to the full row without padding; learned positions, GELU, dropout."""

    def __init__(self, layers: int, dropout: float, **_: Any):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        seen = (tokens != 0)[:, None, None, :]
        seen = seen | (positions == 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward, each followed by a LayerNorm."""

    def __init__(self, dropout: float):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.first(x + self.drop(self.out(y.transpose(1, 2).flatten(2))))
        return self.second(x + self.drop(self.down(F.gelu(self.up(x)))))


class Capped(nn.Module):
    """Attention in plain operators over a window, tanh caps on scores and logits, norms that scale by 1 + w (Gemma)."""

    def __init__(self, cap: float, window: int, **_: Any):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * (WIDTH // HEADS) * 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.Parameter(torch.zeros(WIDTH))
        self.cap, self.window = cap, window

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) * WIDTH**0.5
        y = self.normed(x)
        k, v = self.kv(y).chunk(2, -1)
        q, k, v = heads(self.q(y)), heads(k, 2).repeat_interleave(2, 1), heads(v, 2).repeat_interleave(2, 1)
        scores = self.cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / self.cap)
        far = positions[:, :, None] - positions[:, None, :]
        seen = (far >= 0) & (far < self.window)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        logits = F.linear(self.normed(x), self.embed.weight)
        return self.cap * torch.tanh(logits / self.cap)

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.norm)


class Slopes(nn.Module):
    """Heads that share one key and add a slope times the distance to the scores (ALiBi)."""

    def __init__(self, **_: Any):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * (WIDTH // HEADS))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        k, v = self.kv(self.norm(x)).chunk(2, -1)
        far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None, :]
        slopes = 0.5 ** torch.arange(1, HEADS + 1, dtype=x.dtype)
        bias = torch.where(far >= 0, -far * slopes[:, None, None], float("-inf"))
        q = heads(self.q(self.norm(x)))
        k, v = (t[:, None].expand_as(q) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class Linear(nn.Module):
    """Attention without softmax: running sums of keys times values."""

    def __init__(self, **_: Any):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        y = torch.einsum("bthk,bthkv->bthv", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        y = self.norm(y.flatten(0, 1).flatten(1)).view_as(x)
        return self.head(x + y * torch.sigmoid(self.gate(x)))


class Convolution(nn.Module):
    """A gated causal convolution of each feature, between two matmuls."""

    def __init__(self, kernel: int, **_: Any):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.kernel = nn.Conv1d(WIDTH, WIDTH, kernel, groups=WIDTH), kernel

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        y, gate = self.into(x).chunk(2, -1)
        y = self.conv(F.pad(y.mT, (self.kernel - 1, 0))).mT
        return self.head(x + self.out(F.silu(y) * gate))


class Shared(nn.Module):
    """One layer applied three times with a scale per turn (a universal transformer); LoRA on frozen weights."""

    def __init__(self, checkpointed: bool, **_: Any):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.base, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.low_a, self.low_b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, 3 * WIDTH, bias=False)
        self.turns = nn.Parameter(torch.tensor([1.0, 0.7, 0.4]))
        self.norm, self.checkpointed = nn.RMSNorm(WIDTH), checkpointed

    def layer(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = map(heads, (self.base(y) + self.low_b(self.low_a(y))).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for turn in self.turns:
            y = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else None
            x = x + turn * (self.layer(x) if y is None else y)
        return self.head(x)


class Rotating(nn.Module):
    """Rotation by complex numbers, a weight split into norm and direction, attention with a learned temperature."""

    def __init__(self, **_: Any):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 24 * 3, bias=False)
        self.direction, self.size = nn.Parameter(torch.randn(VOCAB, 24)), nn.Parameter(torch.ones(VOCAB, 1))
        self.temperature = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in self.qkv(self.embed(tokens)).chunk(3, -1))
        angles = positions[:, None, :, None].to(q.dtype) * torch.tensor([1.0, 0.3, 0.1], dtype=q.dtype)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
        y = F.scaled_dot_product_attention(F.normalize(q, dim=-1) * self.temperature.exp(), k, v, is_causal=True)
        weight = self.size * self.direction / self.direction.norm(dim=1, keepdim=True)
        return F.linear(y.transpose(1, 2).flatten(2), weight)


class Mixer(nn.Module):
    """Matmuls over the dim of tokens, and a second head for the token after the next."""

    def __init__(self, tokens: int = 64, **_: Any):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head, self.second = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, VOCAB)
        self.mixing = nn.Parameter(torch.randn(tokens, tokens) * 0.2)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x, n = self.embed(tokens), tokens.shape[1]
        x = x + (self.mixing[:n, :n].tril() @ self.norm(x))
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return self.head(x), self.second(x)


def two_terms(**_: Any) -> Terms:
    """Return cross-entropy, and a mean square that is not normalized by labels."""

    def of(model: nn.Module, batch: Batch) -> Any:
        logits, second = model(batch["tokens"], batch["positions"])
        return mean_over(logits, batch["labels"]), 0.1 * second.square().mean()

    return of


class Teacher(nn.Module):
    """A buffer with a running mean of outputs, a frozen target, and values that stop gradients."""

    mean: Tensor
    steps: Tensor

    def __init__(self, **_: Any):
        super().__init__()
        self.embed, self.student = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = torch.sigmoid(self.teacher(x) - self.mean)
        y = self.student(torch.tanh(x)) * self.gain
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
            self.steps.add_(1)
        return y, target


def distilled(**_: Any) -> Terms:
    def of(model: Any, batch: Batch) -> Any:
        y, target = model(batch["x"])
        embedded = model.embed(batch["tokens"])
        return None, F.mse_loss(y + embedded, target + embedded.detach()) + 0.1 * F.smooth_l1_loss(y, batch["x"])

    return of


def features(generator: torch.Generator, rows: int, length: int, **options: Any) -> Batch:
    """Return features of width WIDTH, and tokens."""
    return {**token_batch(generator, rows, length, "all"), "x": normal(generator, rows, length, WIDTH)}


class Memory(nn.Module):
    """A table of slots, written and read by index: scatter, gather, index_put, where, one-hot."""

    def __init__(self, **_: Any):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(2 * WIDTH, VOCAB)
        self.slots = nn.Parameter(torch.randn(5, WIDTH))
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, which = self.embed(tokens), tokens % 5
        added = torch.zeros_like(x[:, :5]) if x.shape[1] >= 5 else x.new_zeros(x.shape[0], 5, x.shape[2])
        added = added.scatter_add(1, which[..., None].expand_as(x), x)
        read = (added + self.slots).gather(1, which[..., None].expand_as(x))
        shown = torch.where((tokens > 6)[..., None], self.table[tokens], F.one_hot(which, WIDTH).to(x.dtype))
        return self.head(torch.cat((read, shown.masked_fill((positions == 1)[..., None], 0.5)), -1))


class Skips(nn.Module):
    """Layers of the first half pass their outputs to their mirror images in the second half, as in a U-Net."""

    def __init__(self, layers: int, **_: Any):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, outputs = self.tokens(tokens) + (positions % 3)[..., None], list[Tensor]()
        for number, layer in enumerate(self.layers):
            if number >= len(self.layers) - len(self.layers) // 2:
                x = x + outputs.pop()
            x = x + torch.tanh(layer(x))
            if number < len(self.layers) // 2:
                outputs.append(x)
        return self.head(x)


def lm(build: Any, **space: tuple[Any, ...]) -> Kind:
    """Return a kind of token model with a loss over labels."""
    return Kind("plain", build, terms, token_batch, space | LABELS)


KINDS = {
    "reader": lm(Reader),
    "encoder": lm(Encoder, layers=(1, 2, 3), dropout=(0.0, 0.0, 0.2)),
    "capped": lm(Capped, cap=(5.0, 1.0), window=(3, 2, 100)),
    "slopes": lm(Slopes),
    "linear": lm(Linear),
    "convolution": lm(Convolution, kernel=(3, 2)),
    "shared": lm(Shared, checkpointed=(False, True)),
    "rotating": lm(Rotating),
    "mixer": Kind("plain", Mixer, two_terms, token_batch, {"labels": LABELS["labels"]}),
    "teacher": Kind("plain", Teacher, distilled, features),
    "memory": lm(Memory),
    "skips": lm(Skips, layers=(4, 3, 5)),
}
