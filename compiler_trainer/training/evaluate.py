"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from compiler_trainer.models import IGNORED_LABEL


class Evaluates(Protocol):
    """What gives the mean loss of a global batch."""

    def evaluate(self, batch: dict[str, Tensor], /) -> float: ...


def mean_loss(step: Evaluates, batches: Iterable[dict[str, Tensor]]) -> float:
    """Mean loss over all labelled tokens of the global `batches`: one of few labels counts for less."""
    total, labels = 0.0, 0
    for batch in batches:
        labelled = int((batch["labels"] != IGNORED_LABEL).sum())
        total += step.evaluate(batch) * labelled
        labels += labelled
    return total / labels
