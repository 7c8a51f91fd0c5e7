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
from passes.ir.ir import Input
from passes.update.groups import kind_of

# after a step: loss, grad_norm, parameters, buffers, moments as `optim.MOMENT.NAME`; of eager PyTorch also
# `chance.NAME`, the entries of a parameter moved only by rounding noise of a zero gradient
Found = dict[str, Tensor]
ROUNDING = 1e-12  # of the largest gradient: smaller nonzero gradients count as rounding noise
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
                ahead = weight.grad.lerp(buffer, beta).flatten()
                for places in group["matrices"]:
                    ahead[places] = orthogonal(ahead[places])
                weight.sub_(lr * ahead.view(weight.shape))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrices [..., m, n] with singular values near 1, times 0.2 sqrt(max(m, n))."""
    size = 0.2 * math.sqrt(max(matrix.shape[-2:]))
    if matrix.shape[-2] > matrix.shape[-1]:
        return orthogonal(matrix.mT).mT
    x = matrix / torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return size * x


def matrices_of(parameter: Input) -> list[Tensor]:
    """Return the places [..., m, n] in a flat weight of the entries of its matrices, a tensor for each of its parts."""
    shape, parts = parameter.spec.shape, parameter.parts
    places = torch.arange(math.prod(shape)).view(shape)
    if "convolution" in parameter.roles:
        return [places.flatten(1)]
    if parts is None:
        return [places]
    rows = places.transpose(-1, -2) if parts.dim == -1 else places
    blocks = rows.unflatten(-2, (parts.outer, sum(parts.sizes), parts.inner)).split(parts.sizes, -3)
    return [block.flatten(-4, -2) for block in blocks]


def train(subject: Subject, settings: Settings) -> list[Found]:
    """Return the state after each step of eager PyTorch; its optimizers skip parameters without a gradient."""
    model = subject.eager(copy.deepcopy(subject.model))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optim = build(OptimConfig, settings.optim, "optim")
    optimizers = list(optimizers_of(model, trained, subject, optim))
    states, chance = [], dict(scaled(trained, optimizers))
    for batch, lr in zip(subject.batches, settings.lrs):
        for parameter in trained.values():
            parameter.grad = None
        loss = backward(subject, model, batch, settings.microbatches)
        gradients = {name: p.grad.div_(settings.microbatches) for name, p in trained.items() if p.grad is not None}
        largest = max((gradient.abs().max() for gradient in gradients.values()), default=0.0)
        for name, entries in ((name, entries) for name, entries in chance.items() if name in gradients):
            gradient = gradients[name].abs()
            small = gradient < ROUNDING * largest
            if small.all() or (small & (gradient > 0)).any():  # otherwise they are exact zeros of unused rows
                entries |= small
        norm = nn.utils.clip_grad_norm_(trained.values(), optim.max_norm or math.inf)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["factor"]
            optimizer.step()
        state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **moments(trained, optimizers)}
        metrics = {"loss": loss, "grad_norm": norm} | {f"chance.{name}": entries for name, entries in chance.items()}
        states.append({name: value.detach().clone() for name, value in (metrics | state).items()})
    return states


def scaled(
    trained: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """Return empty masks for parameters whose optimizer scales gradients by their size: rounding noise moves these."""
    parameters = [
        p for o in optimizers if not isinstance(o, torch.optim.SGD) for g in o.param_groups for p in g["params"]
    ]
    ids = set(map(id, parameters))
    return ((name, torch.zeros_like(p, dtype=torch.bool)) for name, p in trained.items() if id(p) in ids)


def backward(subject: Subject, model: nn.Module, batch: Batch, microbatches: int) -> Tensor:
    """Return the loss of a batch; add its gradients times the number of microbatches to the parameters'.

    Each microbatch's own loss is differentiated, not its share of the batch's, because functions that are not linear in
    the gradient depend on it. A microbatch without labels gives them a zero gradient, from which they may compute
    something.
    """
    total = torch.zeros((), dtype=torch.float64)
    for microbatch, share in microbatches_of(batch, microbatches):
        terms = list(terms_of(subject, model, microbatch, share))
        for term in terms:
            total = total + term.detach().double() / microbatches
        if terms:
            sum(terms).backward()  # type: ignore[union-attr]
    return total


@torch.no_grad()
def evaluate(subject: Subject, microbatches: int) -> Tensor:
    """Return the loss of the first batch; no microbatch changes the model for the next."""
    total = torch.zeros((), dtype=torch.float64)
    for microbatch, share in microbatches_of(subject.batches[0], microbatches):
        for term in terms_of(subject, subject.eager(copy.deepcopy(subject.model)), microbatch, share):
            total = total + term.double() / microbatches
    return total


def microbatches_of(batch: Batch, number: int) -> Iterator[tuple[Batch, Tensor | None]]:
    """Yield each microbatch with its number of labels relative to the mean, if there are labels."""
    parts = {key: value.chunk(number) for key, value in batch.items()}
    labels = [(part >= 0).sum().double() for part in parts.get("labels", ())]
    for index in range(number):
        microbatch = {key: chunks[index] for key, chunks in parts.items()}
        if labels and not labels[index]:  # a mean over no labels is undefined: use any labels, with a share of zero
            microbatch["labels"] = torch.zeros_like(microbatch["labels"])
        yield microbatch, labels[index] * number / sum(labels) if labels else None


def terms_of(subject: Subject, model: nn.Module, batch: Batch, share: Tensor | None) -> Iterator[Tensor]:
    """Yield the terms of a microbatch's loss: its share of a mean over the batch's labels, and a mean of its own."""
    over_labels, other = subject.terms(model, batch)
    if other is not None:
        yield other
    if over_labels is not None:
        yield over_labels if share is None else over_labels * share


def optimizers_of(
    model: nn.Module, trained: dict[str, nn.Parameter], subject: Subject, optim: OptimConfig
) -> Iterator[torch.optim.Optimizer]:
    """Yield PyTorch's optimizers, one a parameter, by the groups of `optim`."""

    def group_of(name: str) -> GroupConfig:
        kinds = {kind_of(subject.parameters[name]), *subject.parameters[name].roles}
        for group in optim.groups.values():
            if kinds & set(group.kinds) or any(fnmatchcase(name, pattern) for pattern in group.names):
                return group
        return GroupConfig()

    for name, parameter in trained.items():
        group = group_of(name) if name in subject.parameters else GroupConfig()
        decay = optim.weight_decay if group.weight_decay is None else group.weight_decay
        groups: list[dict[str, Any]] = [{"params": [parameter], "factor": group.lr}]
        kind = group.optimizer or optim.name
        if kind == "muon":
            use = subject.parameters.get(name)  # None: the loss does not depend on it
            kind = "muon" if use and (group.optimizer or kind_of(use) == "matrix") else "adamw"
            groups[0]["matrices"] = matrices_of(use) if use and kind == "muon" else []
        if kind == "sgd":
            yield torch.optim.SGD(groups, momentum=optim.momentum, weight_decay=decay)
        elif kind == "muon":
            yield Muon(groups, optim.momentum, decay)
        else:
            yield torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps, weight_decay=decay)


def moments(trained: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> Found:
    """Return the moments of each parameter from the optimizers; first moments are sums of gradients."""
    names = {id(parameter): name for name, parameter in trained.items()}
    return {
        f"optim.{MOMENTS[moment]}.{names[id(parameter)]}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for moment, value in state.items()
        if moment in MOMENTS and value is not None
    }
