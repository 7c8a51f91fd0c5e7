"""Loss and metrics on held-out text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from compiler_trainer.models import IGNORED_LABEL


class Measures(Protocol):
    """What gives the mean loss and the metrics of a global batch."""

    def measure(self, batch: dict[str, Tensor], /) -> dict[str, float]: ...


def means(step: Measures, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Loss and metrics, means over all labelled tokens of the global `batches`: one of few labels counts for less."""
    total, labels = Counter[str](), 0
    for batch in batches:
        labelled = int((batch["labels"] != IGNORED_LABEL).sum())
        total.update({name: value * labelled for name, value in step.measure(batch).items()})
        labels += labelled
    return {name: value / labels for name, value in total.items()}
