"""A small mixture of experts with tokens sorted by expert, in the ways in which models write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracle import Batch
from products import sliced_products
from torch import Tensor, nn

WIDTH, INNER, TOP = 6, 5, 2


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `F.grouped_mm` under capture; a loop of matmuls on one device, because it does not support fp64."""
    return (F.grouped_mm if torch.compiler.is_exporting() else sliced_products)(rows, weight, offs=ends)


def by_histogram(ids: Tensor, experts: int) -> Tensor:
    return torch.histc(ids.double(), bins=experts, min=0, max=experts - 1)


def in_pairs(ids: Tensor, experts: int) -> Tensor:
    """Return counts in bins of two experts each: as many bins as experts, half of them empty."""
    return torch.histc(ids.double(), bins=experts, min=0, max=2 * experts - 1)


def by_comparing(ids: Tensor, experts: int) -> Tensor:
    return (ids[:, None] == torch.arange(experts)).sum(0)


def inverse_put(rows: Tensor, perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return rows[inverse]


def inverse_sorted(rows: Tensor, perm: Tensor) -> Tensor:
    return rows[perm.argsort()]


def rows_put(rows: Tensor, perm: Tensor) -> Tensor:
    back = torch.zeros_like(rows)
    back[perm] = rows
    return back


COUNTS = {"histogram": by_histogram, "comparing": by_comparing, "pairs": in_pairs}
BACK = {"inverse": inverse_put, "argsort": inverse_sorted, "put": rows_put}


def of_the_unsorted(ids: Tensor, experts: int) -> Tensor:
    """Return a mask of the expert that each slot chose, [slots, experts]."""
    return ids[:, None] == torch.arange(experts)


class Mixture(nn.Module):
    """B sequences of T tokens through the TOP of E experts that a router chooses, and back."""

    def __init__(self, experts: int = 6, biases: bool = False, counts: str = "histogram", back: str = "inverse",
                 between: nn.Module | None = None, favoured: int | None = None):
        super().__init__()
        self.counts, self.back, self.between = COUNTS[counts], BACK[back], between or nn.Identity()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.router.weight.data *= 4  # so that tokens choose differently, and all experts are chosen
        self.up = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(experts, INNER, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(experts, WIDTH)) if biases else None
        if favoured is not None:
            self.router.bias.data[favoured] += 50.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        return self.last(x + self.experts(self.norm(x).flatten(0, 1)).view_as(x))

    def experts(self, x: Tensor) -> Tensor:
        """Return [N, WIDTH] for N tokens."""
        weights, ids = self.at("scores", self.router(x)).softmax(-1).topk(TOP)
        weights, ids = self.at("chosen", self.weigh(weights, ids)), ids.reshape(-1)
        share = of_the_unsorted(ids, self.up.shape[0]).double().mean(0).to(x.dtype)  # as for an auxiliary loss
        ids, perm = ids.sort()
        ends = self.counts(ids, self.up.shape[0]).cumsum(0, dtype=torch.int32)
        routed = self.at("routed", x[perm // TOP])
        gate, up = grouped(routed, self.at("up", self.up).transpose(1, 2), ends).chunk(2, -1)
        rows = grouped(self.at("hidden", self.between(F.silu(gate) * up)), self.at("down", self.down), ends)
        rows = rows if self.bias is None else rows + self.bias[ids]
        rows = self.at("made", rows) * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.back(rows, perm).view(-1, TOP, WIDTH).sum(1) * (1 + share[0])

    def at(self, place: str, x: Tensor) -> Tensor:
        """Return the value at a hook point."""
        return x

    def weigh(self, weights: Tensor, ids: Tensor) -> Tensor:
        return weights


class Dropping(Mixture):
    """A mixture without room for tokens beyond the first few from a source to an owner."""

    def __init__(self, sources: int, owners: int, capacity: int, **changes):
        super().__init__(**changes)
        self.sources, self.owners, self.capacity, self.dropped = sources, owners, capacity, 0

    def weigh(self, weights: Tensor, ids: Tensor) -> Tensor:
        keep = torch.ones(ids.numel(), dtype=torch.bool)
        of_each = -(-self.up.shape[0] // self.owners)
        for run in torch.arange(ids.numel()).chunk(self.sources):
            by_expert = sorted(run.tolist(), key=lambda slot: int(ids.flatten()[slot]))
            for owner in range(self.owners):
                own = [slot for slot in by_expert if int(ids.flatten()[slot]) // of_each == owner]
                keep[own[self.capacity :]] = False
        self.dropped = int((~keep).sum())
        return weights * keep.view_as(weights)


def mixture(**changes) -> Mixture:
    """Return a mixture with the same weights at each call."""
    torch.manual_seed(0)
    return Mixture(**changes).double()


def sequences(rows: int = 4, length: int = 6) -> list[Batch]:
    """Return three batches for a mixture."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (rows, length, 3), "y": (rows, length, 2)}
    return [{k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()} for _ in range(3)]
