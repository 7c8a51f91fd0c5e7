"""Training by plain PyTorch, and small models to compare it with compiled steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiler_trainer as ct
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models import Llama

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], Tensor]

VOCAB, SEQ_LEN = 61, 7
EXACT = 1e-10  # in fp64
LRS = (1e-2, 3e-2, 2e-2)  # of three steps
ADAMW = {"name": "adamw", "betas": (0.8, 0.9), "weight_decay": 0.1, "max_norm": 0.5}


def llama(n_layers: int = 1, dtype: torch.dtype = torch.float64, **changes: Any) -> Llama:
    """Return a Llama whose feed-forward and vocabulary are divisible by nothing; the same weights at each call."""
    torch.manual_seed(0)
    sizes = {"dim": 24, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 37, "vocab_size": VOCAB}
    cfg = ModelConfig(n_layers=n_layers, **{**sizes, **changes})
    return Llama(cfg).to(dtype)


def llama_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy in the model's own dtype."""
    logits = model(batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def batches(n: int = len(LRS), rows: int = 5) -> list[Batch]:
    """Return batches with ignored labels, a different number of them in each sequence."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(SEQ_LEN).expand(rows, SEQ_LEN).contiguous()

    def one() -> Batch:
        tokens, labels = (torch.randint(0, VOCAB, (rows, SEQ_LEN), generator=generator) for _ in range(2))
        ignored = torch.rand(rows, SEQ_LEN, generator=generator) < 0.3
        return {"tokens": tokens, "positions": positions, "labels": labels.masked_fill(ignored, -100)}

    return [one() for _ in range(n)]


class Embedded(nn.Module):
    """An embedding of 61 tokens, tanh and a head: `[rows, seq]` tokens to `[rows, seq, 61]` logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

    def forward(self, tokens):
        return self.head(self.embed(tokens).tanh())


class Perceptron(nn.Module):
    """Layers with biases, a parameter with a single entry, an unused one, and a frozen one."""

    def __init__(self, between: nn.Module):
        super().__init__()
        self.up, self.between, self.down = nn.Linear(5, 7), between, nn.Linear(7, 3)
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self.up(x)))) * self.scale + self.frozen


def perceptron(between: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> Perceptron:
    """Return a perceptron with the same weights at each call; `between` stands between its layers."""
    torch.manual_seed(0)
    return Perceptron(between or nn.Identity()).to(dtype)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples and features."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def points(rows: int = 5, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Return batches for a perceptron."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (rows, 5), "y": (rows, 3)}
    return [{k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()} for _ in range(3)]


NO_DECAY = {"name": "adamw", "max_norm": 0.5}  # PyTorch does not decay a parameter that has no gradient


def optimizer_of(model: nn.Module, name: str, betas=(0.9, 0.999), momentum=0.0, weight_decay=0.0, **_) -> Any:
    """Return PyTorch's optimizer of the same options."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=momentum, weight_decay=weight_decay)
    return torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=weight_decay)


def train_plainly(model: nn.Module, loss_fn: LossFn, data: Sequence[Batch], optim: Mapping[str, Any] = ADAMW,
                  microbatches: int = 1) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return metrics of each step and the final parameters and buffers, by eager PyTorch on one device.

    The loss of a microbatch counts by its labels, if it has any.
    """
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model, **optim)
    metrics = []
    for batch, lr in zip(data, LRS, strict=True):
        parts = {key: value.chunk(microbatches) for key, value in batch.items()}
        losses = [loss_fn(model, {key: chunks[i] for key, chunks in parts.items()}) for i in range(microbatches)]
        labels = [(part != -100).sum() for part in parts["labels"]] if "labels" in parts else [1] * microbatches
        loss = sum(own * n for own, n in zip(losses, labels)) / sum(labels)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.get("max_norm") or float("inf"))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        metrics.append({"loss": loss.item(), "grad_norm": norm.item()})
    return metrics, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def compile_lockstep(model: nn.Module, loss_fn: LossFn, batch: Batch, mesh: Mapping[str, int],
                     optim: Mapping[str, Any] = ADAMW, evaluate: bool = False, **options: Any) -> ct.Step:
    """Return the step of all ranks in this process, only for training unless `evaluate` is set."""
    options |= {"mesh": mesh, "optim": optim, "evaluate": evaluate, "ranks": "lockstep"}
    return ct.compile_step(model, loss_fn, batch, **options)


def train_step(step: ct.Step, data: Sequence[Batch]) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    return [step(batch, lr) for batch, lr in zip(data, LRS, strict=True)]


def trained_alike(model: nn.Module, loss_fn: LossFn, data: Sequence[Batch], mesh: Mapping[str, int],
                  optim: Mapping[str, Any] = ADAMW, microbatches: int = 1, **options: Any) -> ct.Step:
    """Return the step, after checking its updates against eager PyTorch; for models in fp64."""
    metrics, state = train_plainly(model, loss_fn, data, optim, microbatches)
    step = compile_lockstep(model, loss_fn, data[0], mesh, optim, microbatches=microbatches, **options)
    for found, wanted in zip(train_step(step, data), metrics, strict=True):
        assert_same(found, wanted, EXACT)
    assert_same(step.state_dict(), state, EXACT)
    return step


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> None:
    """Assert that every entry exists and is equal to `tolerance`, absolutely and relatively."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        ours, theirs = torch.as_tensor(found[name]), torch.as_tensor(value)
        say = f"{name}: {{}}".format
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, msg=say)
