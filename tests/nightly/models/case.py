"""A case: a model of some library, how to build it, and the meshes to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
STEPS = 2
ROWS = 3  # of a batch: with two ranks, one has padding
MESHES: dict[str, dict[str, int]] = {
    "dp_shard 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "dp_shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "dp_shard 2 x tp 3": {"dp_shard": 2, "tp": 3},
    "cp 2": {"cp": 2},
    "dp_shard 2 x tp 2, bf16": {"dp_shard": 2, "tp": 2},
}
PASSES: dict[str, dict[str, Any]] = {"dp_shard 2 x tp 2, bf16": {"cast": {"param_dtype": "bfloat16"}}}


@dataclass(frozen=True)
class Case:
    """A model, its loss (a scalar from a model and a batch) and one batch per step."""

    model: nn.Module
    loss: Loss
    batches: list[Batch]


@dataclass(frozen=True)
class Entry:
    """A row of the model table. `library`: its name on PyPI; `sequence`: dim 1 of the batches is a sequence."""

    name: str
    library: str
    build: Callable[[], Case]
    sequence: bool = False

    @property
    def meshes(self) -> tuple[str, ...]:
        """Return the names of the `MESHES` to train the model on."""
        return tuple(name for name, sizes in MESHES.items() if self.sequence or "cp" not in sizes)


def batches(make: Callable[[torch.Generator], Batch]) -> list[Batch]:
    """Return one batch per step."""
    return [make(torch.Generator().manual_seed(step)) for step in range(STEPS)]


def ids(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    """Return random ids, int64, without 0 and 1, which often mean padding."""
    return torch.randint(2, vocabulary, shape, generator=generator)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=generator)


def first(output: Any) -> Tensor:
    """Return the first tensor of a model's output."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if hasattr(output, "values") else output))
    return output


def squares(output: Any) -> Tensor:
    """Return a loss that needs no target: the mean square of the distance to a ramp over the last dim."""
    value = first(output)
    return (value - torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype)).square().mean()
