"""The subject of a comparison: a model trained twice, by eager PyTorch and by a compiled step, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from compiler_trainer.config.schema import OptimConfig, PassesConfig
from passes.ir.ir import Input

Batch = dict[str, Tensor]
Terms = Callable[[nn.Module, Batch], tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Subject:
    """A model in the dtype of the comparison, its loss and a batch for each step.

    The loss is the sum of two terms: a mean over the labels that are not negative, and a mean of another kind. `eager`
    converts the model to one that eager PyTorch can run. `parameters` are inputs of the compiled step by name: their
    uses decide on parameter groups and on the matrices that Muon takes.
    """

    model: nn.Module
    terms: Terms
    batches: Sequence[Batch]
    eager: Callable[[nn.Module], nn.Module] = lambda model: model
    parameters: Mapping[str, Input] = field(default_factory=dict)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar to minimise, as a user writes it."""
        over_labels, other = self.terms(model, batch)
        if over_labels is None or other is None:
            return over_labels if other is None else other  # type: ignore[return-value]
        return over_labels + other


@dataclass(frozen=True)
class Settings:
    """The settings of training: ranks along each axis, optimizer, options of passes, the learning rate of each step.

    With `evaluates` the first batch is evaluated before it is trained on.
    """

    mesh: Mapping[str, int] = field(default_factory=dict)
    optim: Mapping[str, Any] | OptimConfig = field(default_factory=lambda: {"name": "sgd"})
    passes: Mapping[str, Any] | PassesConfig = field(default_factory=dict)
    microbatches: int = 1
    lrs: Sequence[float] = (0.05, 0.15, 0.1)
    evaluates: bool = False
