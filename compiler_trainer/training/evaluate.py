"""Loss and metrics on held-out text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from compiler_trainer.data.loader import Loader
from compiler_trainer.models import IGNORED_LABEL


class Measures(Protocol):
    """What gives the mean loss and the metrics of a global batch."""

    def measure(self, batch: dict[str, Tensor], /) -> dict[str, float]: ...


def means(step: Measures, batches: Iterable[dict[str, Tensor]]) -> tuple[dict[str, float], int]:
    """Loss and metrics, means over all labelled tokens of the global `batches`, and how many tokens these are."""
    total, labels = Counter[str](), 0
    for batch in batches:
        labelled = int((batch["labels"] != IGNORED_LABEL).sum())
        total.update({name: value * labelled for name, value in step.measure(batch).items()})
        labels += labelled
    return {name: value / labels for name, value in total.items()}, labels


def held_out(loader: Loader, batches: int | None) -> Iterator[dict[str, Tensor]]:
    """The first so many global batches, the same each time; with None every row once."""
    if batches is None:
        return every_row(loader)
    loader.reset()
    return (loader.next() for _ in range(batches))


def every_row(loader: Loader) -> Iterator[dict[str, Tensor]]:
    """Every row once, in order; what fills the last batch has no labels."""
    rows, size = loader.rows, loader.batch_size
    for first in range(0, len(rows), size):
        numbers = np.arange(first, first + size)
        batch = rows.batch(np.minimum(numbers, len(rows) - 1), loader.read)
        batch["labels"][numbers >= len(rows)] = IGNORED_LABEL
        yield {name: torch.from_numpy(array) for name, array in batch.items()}
