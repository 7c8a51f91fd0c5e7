"""Models of inputs other than token sequences: points, images, pairs, and rows sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.parity.subject import Batch, Terms
from tests.nightly.parity.models.kind import Kind, normal
from tests.support.products import sliced_products

INNER = 7


class Perceptron(nn.Module):
    """Layers with biases, a one-entry parameter, an unused one, a frozen one, and a norm or none."""

    def __init__(self, norm: str, **_: Any):
        super().__init__()
        self.up, self.down = nn.Linear(5, INNER), nn.Linear(INNER, 3)
        norms = nn.ModuleDict({"none": nn.Identity(), "batch": nn.BatchNorm1d(INNER), "layer": nn.LayerNorm(INNER)})
        self.norm = norms[norm]
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x)))) * self.scale + self.frozen


def squared(loss: str = "mean", **_: Any) -> Terms:
    """Return the mean over all entries, or the sum over features of means over rows."""

    def of(model: nn.Module, batch: Batch) -> Any:
        off = (model(batch["x"]) - batch["y"]).square()
        return None, off.mean() if loss == "mean" else off.flatten(1).sum(1).mean()

    return of


def points(generator: torch.Generator, rows: int, length: int, **_: Any) -> Batch:
    return {"x": normal(generator, rows, 5), "y": normal(generator, rows, 3)}


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's transpose, with a mixed norm of the code as a penalty."""

    def __init__(self, **_: Any):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(INNER, 5) * 0.5), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        code = F.softplus(x @ self.weight.t())
        return F.linear(code, self.weight.t(), self.bias)[:, :3] + 0.1 * code.norm(dim=1, keepdim=True)


class Image(nn.Module):
    """Patches by a convolution, a class token, attention, and a head on that token (ViT)."""

    def __init__(self, **_: Any):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 2, stride=2), nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 10, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        y = self.norm(x)
        return self.head((x + self.attention(y, y, y, need_weights=False)[0])[:, 0])


def classified(**_: Any) -> Terms:
    return lambda model, batch: (None, F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1))


def images(generator: torch.Generator, rows: int, length: int, **_: Any) -> Batch:
    return {"x": normal(generator, rows, 3, 6, 6), "y": torch.randint(0, 5, (rows,), generator=generator)}


class Towers(nn.Module):
    """Two towers; each row is compared with all others of the batch (CLIP)."""

    def __init__(self, **_: Any):
        super().__init__()
        self.left, self.right = nn.Linear(5, INNER), nn.Linear(3, INNER)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        return left @ right.t() * self.temperature.exp()


def contrasted(**_: Any) -> Terms:
    def of(model: nn.Module, batch: Batch) -> Any:
        logits = model(batch["x"], batch["y"])
        targets = torch.arange(logits.shape[0])
        return None, (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2

    return of


class Mixture(nn.Module):
    """A mixture of experts that sorts rows by expert, counts them and puts them back as other libraries do."""

    def __init__(self, experts: int, counts: str, back: str, biases: bool, **_: Any):
        super().__init__()
        self.counts, self.back, self.count = counts, back, experts
        self.first, self.last, self.norm = nn.Linear(3, 6), nn.Linear(6, 2), nn.LayerNorm(6)
        self.router = nn.Linear(6, experts)
        self.router.weight.data *= 4  # so that tokens choose different experts
        self.up, self.down = (nn.Parameter(torch.randn(experts, n, 6) / 2) for n in (10, 5))
        self.bias = nn.Parameter(torch.randn(experts, 6)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.experts(self.norm(x).flatten(0, 1)).view_as(x))

    def experts(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        ids, perm = ids.reshape(-1).sort()
        if self.counts == "histogram":
            sizes = torch.histc(ids.double(), bins=self.count, min=0, max=self.count - 1)
        else:
            sizes = (ids[:, None] == torch.arange(self.count)).sum(0)
        ends = sizes.cumsum(0, dtype=torch.int32)
        gate, up = grouped(x[perm // 2], self.up.transpose(1, 2), ends).chunk(2, -1)
        rows = grouped(F.silu(gate) * up, self.down, ends)
        rows = rows if self.bias is None else rows + self.bias[ids]
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restored(rows, perm).view(-1, 2, 6).sum(1)

    def restored(self, rows: Tensor, perm: Tensor) -> Tensor:
        if self.back == "argsort":
            return rows[perm.argsort()]
        if self.back == "put":
            back = torch.zeros_like(rows)
            back[perm] = rows
            return back
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0])
        return rows[inverse]


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `F.grouped_mm` in a capture; otherwise a loop of matmuls, because it takes no fp64."""
    return (F.grouped_mm if torch.compiler.is_exporting() else sliced_products)(rows, weight, offs=ends)


def series(generator: torch.Generator, rows: int, length: int, **_: Any) -> Batch:
    return {"x": normal(generator, rows, length, 3), "y": normal(generator, rows, length, 2)}


MIXTURE: dict[str, tuple[Any, ...]] = {
    "experts": (6, 3, 4, 5),
    "counts": ("histogram", "comparing"),
    "back": ("inverse", "argsort", "put"),
    "biases": (False, True),
}
KINDS = {
    "perceptron": Kind(
        "others", Perceptron, squared, points, {"norm": ("none", "batch", "layer"), "loss": ("mean", "rows")}, False
    ),
    "tied": Kind("others", Tied, squared, points, {"loss": ("mean", "rows")}, False),
    "image": Kind("others", Image, classified, images, {}, False, muon=False),
    "towers": Kind("others", Towers, contrasted, points, {}, False),
    "mixture": Kind("experts", Mixture, squared, series, MIXTURE, True, muon=False),
}
