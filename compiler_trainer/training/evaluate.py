"""Compute loss and metrics on validation data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiler_trainer.data.loader import Batch, Loader
from compiler_trainer.models import IGNORED_LABEL


class Measures(Protocol):
    """An object that returns the mean loss and the metrics of a global batch."""

    def measure(self, batch: dict[str, Tensor], /) -> dict[str, float]: ...


def means(step: Measures, batches: Iterable[tuple[str, Batch]]) -> tuple[dict[str, float], int]:
    """Return loss and metrics, averaged over all labelled tokens or pairs of the batches, and the number of these.

    With several sources, whose names come with the batches, also return the loss of each one as `loss/NAME`.
    """
    total, labels = defaultdict[str, float](float), Counter[str]()
    for source, batch in batches:
        terms = count_terms(batch)
        metrics, name = step.measure(batch), f"loss/{source}"
        for metric, value in (*metrics.items(), (name, metrics["loss"])):
            total[metric] += value * terms
        labels[name] += terms
    count = labels.total()
    metric_names = [name for name in total if name not in labels]
    source_losses = {name: total[name] / labels[name] for name in labels if len(labels) > 1}
    return {name: total[name] / count for name in metric_names} | source_losses, count


def count_terms(batch: Batch) -> int:
    """Return the number of terms that a batch's loss is the mean of: pairs, or labelled tokens without pairs."""
    return int(batch["pairs"].sum() if "pairs" in batch else (batch["labels"] != IGNORED_LABEL).sum())


def held_out(loader: Loader, batches: int | None) -> Iterator[tuple[str, Batch]]:
    """Yield (source, batch) over the validation data.

    With `batches`, take that many first global batches, the same ones each time. With None, take every
    sample once.
    """
    return ((name, fill_batch(loader, numbers)) for name, numbers in by_source(loader, batches))


def by_source(loader: Loader, batches: int | None) -> list[tuple[str, NDArray[np.int64]]]:
    """Return (source, numbers of samples) for each batch to evaluate; a source's last batch may be smaller."""
    rows, size = loader.rows, loader.batch_size
    none = (0,) * len(rows.parts)
    numbers = np.arange(len(rows)) if batches is None else loader.draw(none, batches * size)[0]
    owners = np.searchsorted(rows.firsts, numbers, side="right") - 1
    parts = [(name, numbers[owners == owner]) for owner, name in enumerate(rows.names)]
    return [(name, own[first : first + size]) for name, own in parts for first in range(0, len(own), size)]


def fill_batch(loader: Loader, numbers: NDArray[np.int64]) -> Batch:
    """Return a global batch of these samples; if there are too few, fill it with samples that have no labels."""
    missing = loader.batch_size - len(numbers)
    batch = loader.rows.batch(np.pad(numbers, (0, missing), mode="edge"), loader.read_mask)
    batch["labels"][len(numbers) :] = IGNORED_LABEL
    if "pairs" in batch:
        batch["pairs"][len(numbers) :] = 0
    return {name: torch.from_numpy(array) for name, array in batch.items()}
