"""What is judged: a model of some library, how to build it, and the meshes it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
STEPS = 2
ROWS = 3  # of a batch: over two ranks one has padding
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
    """A model, its loss (a scalar of a model and a batch) and one batch a step."""

    model: nn.Module
    loss: Loss
    batches: list[Batch]


@dataclass(frozen=True)
class Entry:
    """A model of the table; `library` is the name pip knows, `sequence` says that dim 1 of its batches is one."""

    name: str
    library: str
    build: Callable[[], Case]
    sequence: bool = False

    @property
    def meshes(self) -> tuple[str, ...]:
        """Those of `MESHES` that the model is trained on."""
        return tuple(name for name, sizes in MESHES.items() if self.sequence or "cp" not in sizes)


def batches(make: Callable[[torch.Generator], Batch]) -> list[Batch]:
    """One batch a step."""
    return [make(torch.Generator().manual_seed(step)) for step in range(STEPS)]


def ids(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    """Random ids, int64; 0 and 1, which often mean padding, are none of them."""
    return torch.randint(2, vocabulary, shape, generator=generator)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=generator)


def first(output: Any) -> Tensor:
    """The tensor that a model's output is, or its first one."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if hasattr(output, "values") else output))
    return output


def squares(output: Any) -> Tensor:
    """A loss for what has no target: the mean square of the distance to a ramp over the last dim."""
    value = first(output)
    return (value - torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype)).square().mean()
