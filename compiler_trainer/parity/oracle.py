"""Training by eager PyTorch on one device: the reference of every comparison."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from compiler_trainer.config.options import build
from compiler_trainer.config.schema import GroupConfig, OptimConfig
from compiler_trainer.parity.subject import Batch, Settings, Subject

# after a step: loss, grad_norm, parameters, buffers, moments as `optim.MOMENT.NAME`; of eager PyTorch also
# `chance.NAME`, which entries of a parameter were moved by what rounding left of a gradient of zero
Found = dict[str, Tensor]
ROUNDING = 1e-12  # of the largest gradient: what is smaller, and not zero, is taken for rounding
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum", "muon": "momentum"}


class Muon(torch.optim.Optimizer):
    """Nesterov momentum made orthogonal by five Newton-Schulz steps (Jordan et al., 2024), in the weight's dtype.

    PyTorch's own computes in bfloat16. Updates are as large as AdamW's (arXiv:2502.16982).
    """

    def __init__(self, parameters: Iterable[Any], momentum: float, weight_decay: float):
        super().__init__(parameters, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, beta = group["lr"], group["momentum"]
            for weight in (w for w in group["params"] if w.grad is not None):
                buffer = self.state[weight].setdefault("muon", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - beta)
                weight.mul_(1 - lr * group["weight_decay"])
                weight.sub_(lr * orthogonal(weight.grad.lerp(buffer, beta)))


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrices [..., m, n] with singular values near 1, times 0.2 sqrt(max(m, n))."""
    size = 0.2 * math.sqrt(max(matrix.shape[-2:]))
    if matrix.shape[-2] > matrix.shape[-1]:
        return orthogonal(matrix.mT).mT
    x = matrix / torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return size * x


def train(subject: Subject, settings: Settings) -> list[Found]:
    """What each step leaves, by eager PyTorch, whose optimizers pass over parameters that take no part."""
    model = subject.eager(copy.deepcopy(subject.model))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optim = build(OptimConfig, settings.optim, "optim")
    optimizers = list(optimizers_of(model, trained, subject, optim))
    found, chance = [], dict(scaled(trained, optimizers))
    for batch, lr in zip(subject.batches, settings.lrs):
        for parameter in trained.values():
            parameter.grad = None
        loss = backward(subject, model, batch, settings.microbatches)
        gradients = {name: p.grad.div_(settings.microbatches) for name, p in trained.items() if p.grad is not None}
        largest = max((gradient.abs().max() for gradient in gradients.values()), default=0.0)
        for name, entries in ((name, entries) for name, entries in chance.items() if name in gradients):
            gradient = gradients[name].abs()
            small = gradient < ROUNDING * largest
            if small.all() or (small & (gradient > 0)).any():  # else they are zeros of rows that take no part
                entries |= small
        norm = nn.utils.clip_grad_norm_(trained.values(), optim.max_norm or math.inf)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["factor"]
            optimizer.step()
        state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **moments(trained, optimizers)}
        metrics = {"loss": loss, "grad_norm": norm} | {f"chance.{name}": entries for name, entries in chance.items()}
        found.append({name: value.detach().clone() for name, value in (metrics | state).items()})
    return found


def scaled(
    trained: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """No entries yet of each parameter whose optimizer divides gradients by their size, so that rounding moves it."""
    given = [p for o in optimizers if not isinstance(o, torch.optim.SGD) for g in o.param_groups for p in g["params"]]
    ids = set(map(id, given))
    return ((name, torch.zeros_like(p, dtype=torch.bool)) for name, p in trained.items() if id(p) in ids)


def backward(subject: Subject, model: nn.Module, batch: Batch, microbatches: int) -> Tensor:
    """The loss of a batch, its gradients times the number of microbatches added to the parameters'.

    Each microbatch's own loss is differentiated, not its share of the whole: functions that are not linear in the
    gradient can tell. They get a gradient of zero from a microbatch without labels, which they may make something of.
    """
    total = torch.zeros((), dtype=torch.float64)
    for own, share in microbatches_of(batch, microbatches):
        terms = list(terms_of(subject, model, own, share))
        for term in terms:
            total = total + term.detach().double() / microbatches
        if terms:
            sum(terms).backward()  # type: ignore[union-attr]
    return total


@torch.no_grad()
def evaluate(subject: Subject, microbatches: int) -> Tensor:
    """The loss of the first batch, of which no microbatch leaves anything in the model for the next."""
    total = torch.zeros((), dtype=torch.float64)
    for own, share in microbatches_of(subject.batches[0], microbatches):
        for term in terms_of(subject, subject.eager(copy.deepcopy(subject.model)), own, share):
            total = total + term.double() / microbatches
    return total


def microbatches_of(batch: Batch, number: int) -> Iterator[tuple[Batch, Tensor | None]]:
    """Each with how many labels it has of the mean number, if there are labels."""
    parts = {key: value.chunk(number) for key, value in batch.items()}
    labels = [(part >= 0).sum().double() for part in parts.get("labels", ())]
    for at in range(number):
        own = {key: chunks[at] for key, chunks in parts.items()}
        if labels and not labels[at]:  # a mean of nothing, whose share is zero: that of any labels, times zero
            own["labels"] = torch.zeros_like(own["labels"])
        yield own, labels[at] * number / sum(labels) if labels else None


def terms_of(subject: Subject, model: nn.Module, batch: Batch, share: Tensor | None) -> Iterator[Tensor]:
    """The terms of a microbatch's loss: its share of a mean over the whole batch's labels, and a mean of its own."""
    over_labels, other = subject.terms(model, batch)
    if other is not None:
        yield other
    if over_labels is not None:
        yield over_labels if share is None else over_labels * share


def optimizers_of(
    model: nn.Module, trained: dict[str, nn.Parameter], subject: Subject, optim: OptimConfig
) -> Iterator[torch.optim.Optimizer]:
    """PyTorch's optimizers for the groups of `optim`, one of those that are alike."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def group_of(name: str, parameter: nn.Parameter) -> GroupConfig:
        kinds = {"vector"} if parameter.dim() < 2 else set()
        kinds |= {"embedding"} if id(parameter) in looked_up else set()
        kinds |= {"head"} if name == subject.head else set()
        for group in optim.groups.values():
            if kinds & set(group.kinds) or any(fnmatchcase(name, pattern) for pattern in group.names):
                return group
        return GroupConfig()

    for name, parameter in trained.items():
        group = group_of(name, parameter)
        decay = optim.weight_decay if group.weight_decay is None else group.weight_decay
        given = [{"params": [parameter], "factor": group.lr}]
        which = group.optimizer or optim.name
        if which == "sgd":
            yield torch.optim.SGD(given, momentum=optim.momentum, weight_decay=decay)
        elif which == "muon":
            yield Muon(given, optim.momentum, decay)
        else:
            yield torch.optim.AdamW(given, betas=optim.betas, eps=optim.eps, weight_decay=decay)


def moments(trained: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> Found:
    """What optimizers keep of each parameter; their first moments are sums of gradients."""
    names = {id(parameter): name for name, parameter in trained.items()}
    return {
        f"optim.{MOMENTS[moment]}.{names[id(parameter)]}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for moment, value in state.items()
        if moment in MOMENTS and value is not None
    }
