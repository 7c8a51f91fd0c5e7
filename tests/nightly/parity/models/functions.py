"""Custom autograd functions, linear in the gradient or not, on weights, activations, logits and the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.parity.subject import Batch, Terms
from tests.nightly.parity.models.kind import VOCAB, Kind, mean_over, token_batch

WIDTH = 10


class Function(torch.autograd.Function):
    """The identity; a subclass defines the gradient and may read the saved input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clone()


class Scaled(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * g


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = (0.3 * x).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return 0.3 * g * y


class Centered(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g - g.mean(-1, keepdim=True)


class OverRows(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g - 0.5 * g.mean(0, keepdim=True)


class Clipped(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.clamp(-0.01, 0.02)


class Squared(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * g.abs() * 10


class Normalized(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / (g.square().sum(-1, keepdim=True) + 1e-2).sqrt()


class Shifted(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 0.01 + 0.5 * g


class Regularized(Function):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * g.abs() + 1e-2 * x


class Auxiliary(torch.autograd.Function):
    """The identity, which adds a loss of its own: that loss gets gradient 1 whatever comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return g, torch.ones_like(loss)


def auxiliary(x: Tensor) -> Tensor:
    return Auxiliary.apply(x, 0.1 * x.square().mean())


FUNCTIONS = {
    "scaled": Scaled.apply, "straight": StraightThrough.apply, "exponential": Exponential.apply,
    "centered": Centered.apply, "rows": OverRows.apply, "clipped": Clipped.apply, "squared": Squared.apply,
    "normalized": Normalized.apply, "shifted": Shifted.apply, "regularized": Regularized.apply, "auxiliary": auxiliary,
}  # fmt: skip
PLACES = ("activation", "weight", "logits", "loss", "embedding", "experts")


class Net(nn.Module):
    """A norm, two layers and attention, with a custom function at `place`."""

    def __init__(self, function: str, place: str, **_: Any):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.function, self.place = FUNCTIONS[function], place

    def at(self, place: str, x: Tensor) -> Tensor:
        return self.function(x) if place == self.place else x

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) if self.place != "embedding" else F.embedding(tokens, self.function(self.embed.weight))
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = self.at("activation", F.silu(F.linear(x, self.at("weight", self.up.weight), self.up.bias)))
        return self.at("logits", self.head(x + self.down(y)))


def terms(place: str, function: str, **_: Any) -> Terms:
    def of(model: nn.Module, batch: Batch) -> Any:
        loss = mean_over(model(batch["tokens"], batch["positions"]), batch["labels"])
        if place != "loss":
            return loss, None
        tokens = batch["tokens"]
        each = F.cross_entropy(model(tokens, batch["positions"]).flatten(0, 1), tokens.flatten(), reduction="none")
        return loss, FUNCTIONS[function](each.view(tokens.shape)).mean()

    return of


SPACE: dict[str, tuple[Any, ...]] = {
    "function": tuple(FUNCTIONS),
    "place": PLACES[:-1],
    "labels": ("some", "all", "uneven"),
}
KINDS = {"functions": Kind("functions", Net, terms, token_batch, SPACE)}
