"""A kind of model with its options, its loss and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.parity.subject import Batch, Subject, Terms

STEPS = 3
VOCAB = 13
MEANS = ("mean", "quotient", "masked", "smoothed", "squares")  # ways to write a loss over labels

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of model. `build` and `batch` take the options of `space`, whose first values are the defaults.

    With `sequence`, dim 1 of every entry of a batch is a sequence, and axis cp may shard it.
    """

    family: str
    build: Callable[..., nn.Module]
    terms: Callable[..., Terms]
    batch: Callable[..., Batch]
    space: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sequence: bool = True
    eager: Callable[[nn.Module], nn.Module] = lambda model: model
    fits: Callable[[Options], bool] = lambda options: True  # True if options are valid together
    narrow: bool = False  # computes parts in fp32 whatever the dtype of its weights
    muon: bool = True  # no matrix has a zero gradient, whose rounding error Muon would make a direction

    def subject(self, seed: int, rows: int, length: int, chosen: Options) -> Subject:
        """Return the model in fp64 with random weights, and one batch per step."""
        options = {name: values[0] for name, values in self.space.items()} | dict(chosen)
        torch.manual_seed(seed)
        model = self.build(**options).double().train()
        generators = (torch.Generator().manual_seed(seed + 1 + step) for step in range(STEPS))
        batches = [self.batch(generator, rows, length, **options) for generator in generators]
        return Subject(model, self.terms(**options), batches, self.eager)


def token_batch(generator: torch.Generator, rows: int, length: int, labels: str = "some", **_: Any) -> Batch:
    """Return random tokens, positions, and labels, of which a random share per row is ignored."""
    tokens, wanted = (torch.randint(0, VOCAB, (rows, length), generator=generator) for _ in range(2))
    if labels != "all":
        share = torch.rand(rows, 1, generator=generator)
        if labels == "uneven":  # rows without labels
            share = (share > 0.5).double()
        wanted = wanted.masked_fill(torch.rand(rows, length, generator=generator) < share, -100)
        wanted[-1, -1] = 1
    positions = torch.arange(length).expand(rows, length).contiguous()
    return {"tokens": tokens, "positions": positions, "labels": wanted}


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return normally distributed fp64 numbers."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def mean_over(logits: Tensor, labels: Tensor, how: str = "mean") -> Tensor:
    """Return the mean loss over labels that are not ignored, of logits [..., V], written in one of `MEANS`."""
    logits, labels = logits.flatten(0, -2), labels.flatten()
    if how == "mean":
        return F.cross_entropy(logits, labels, ignore_index=-100)
    if how == "smoothed":
        return F.cross_entropy(logits, labels, ignore_index=-100, label_smoothing=0.1)
    counted = labels != -100
    if how == "quotient":
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / counted.sum()
    each = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    if how == "squares":  # z-loss
        each = each + 1e-2 * logits.logsumexp(-1).square()
    return (each * counted).sum() / counted.sum()
