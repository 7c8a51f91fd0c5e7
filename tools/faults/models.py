"""Small models that together use every pass, and their results in plain PyTorch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.models import Llama

Batch = dict[str, Tensor]
LRS = (3e-2, 2e-2)  # of two steps
IGNORED = -1


@dataclass(frozen=True)
class Case:
    """A model, its loss and one batch a step, and the options to compile it with."""

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: list[Batch]
    mesh: Mapping[str, int]
    optim: Mapping[str, Any]
    passes: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    tolerance: float = 1e-8


# ---- a Llama: tensor parallel, FSDP, microbatches, remat, AdamW ------------------------------------


def llama() -> Case:
    """Return a Llama whose heads, feed-forward, vocabulary and sequences no axis divides."""
    cfg = ModelConfig(dim=24, n_layers=2, n_heads=6, n_kv_heads=3, ffn_dim=37, vocab_size=61)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"], batch["positions"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    # every microbatch has as many labels, so that the mean of its means is that of the batch
    batches = [{"positions": torch.arange(7).repeat(6, 1), **random_ids(step, 61, 6, 7)} for step in range(len(LRS))]
    adamw = {"name": "adamw", "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "max_norm": 0.5}
    model, mesh = Llama(cfg).double(), {"dp_shard": 2, "tp": 2}
    return Case(model, loss, batches, mesh, adamw, {"remat": {"policy": "full"}}, microbatches=2)


def rings() -> Case:
    """Return the same case with matmuls overlapped by rings, over ranks that divide no sequence."""
    case = llama()
    return replace(case, mesh={"tp": 3}, passes={"communication": {"async_tp": "all"}}, microbatches=1)


def turns() -> Case:
    """Return the same case with microbatches that take turns in one program."""
    return replace(llama(), passes={"communication": {"batch_overlap": 2}})


# ---- attention over a sharded sequence ---------------------------------------------------------------


class Attention(nn.Module):
    """Grouped attention, causal or within the documents of a sequence."""

    def __init__(self, dim: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, dim // heads
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, (heads + 2 * groups) * self.width)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.width)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Two attentions over an embedding that is also the head."""

    def __init__(self, vocabulary: int = 23, dim: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Attention(dim, 4, 2) for _ in range(2))

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x, row = self.embedding(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        together = documents[:, None, :, None] == documents[:, None, None, :]
        x = self.layers[0](x, None)
        x = self.layers[1](x, together & (row[:, None] >= row))
        return F.linear(x, self.embedding.weight)


def context() -> Case:
    """Return a ring under a causal mask and one under a document mask, with 15 tokens over three ranks."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"], batch["documents"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    documents = torch.tensor([[0] * 5 + [1] * 10, [0] * 13 + [1] * 2, [0] + [1] * 6 + [2] * 8])
    batches = [{"documents": documents, **random_ids(step, 23, 3, 15)} for step in range(len(LRS))]
    for batch in batches:
        batch["labels"][1, 2:] = -100
    optim, mesh = {"name": "sgd", "momentum": 0.9, "max_norm": None}, {"dp_replicate": 2, "cp": 3}
    return Case(Reader().double(), loss, batches, mesh, optim, {"context": {"method": "ring"}})


def in_blocks() -> Case:
    """Return the same case, with blocks of two tokens shared out by documents."""
    case = context()
    return replace(case, passes={"context": {"method": "ring", "load_balance": "blocks", "block": 2}})


# ---- odd parts -----------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """A matmul with a rounded operand, whose backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return (x * 4).round() / 4 @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g @ w.T * ctx.scale, x.T @ g, None


class Odd(nn.Module):
    """Positions looked up by a buffer, a frozen scale, norms with and without eps, a function with its own backward."""

    positions: Tensor

    def __init__(self, vocabulary: int = 31, tokens: int = 7, dim: int = 10, wide: int = 17):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, dim), nn.Embedding(tokens, dim)
        self.norm, self.bare = nn.LayerNorm(dim), nn.LayerNorm(dim, eps=0.0)
        self.up, self.gate, self.down = nn.Linear(dim, wide), nn.Linear(dim, wide), nn.Linear(wide, dim)
        self.through, self.head = nn.Parameter(torch.randn(dim, dim) / 3), nn.Linear(dim, vocabulary)
        self.frozen = nn.Parameter(torch.rand(dim) + 0.5, requires_grad=False)
        self.shift = nn.Embedding(tokens, wide)
        self.register_buffer("positions", torch.arange(tokens).flip(0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(self.positions)
        y = self.norm(x) * self.frozen
        up = (self.up(y).transpose(1, 2) + self.shift(self.positions).t()).transpose(1, 2)
        x = x + self.down(F.silu(self.gate(y)) * up)
        x = x + StraightThrough.apply(self.bare(x).flatten(0, 1), self.through.t().contiguous(), 0.7).view(x.shape)
        x = x / x.square().sum(-1, keepdim=True).sqrt() + torch.cat([x[..., 3:], x[..., :3]], -1).softmax(-1)
        return self.head(x - x.mean(1, keepdim=True)).transpose(0, 1)


def odd() -> Case:
    """Return a net with parts that a Llama lacks; its logits are transposed."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits, labels = model(batch["tokens"]), batch["labels"].transpose(0, 1)
        plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return plain + F.cross_entropy(logits.movedim(-1, 1), labels.clamp(min=0), label_smoothing=0.1) / 10

    batches = [random_ids(step, 31, 5, 7) for step in range(len(LRS))]
    for step, batch in enumerate(batches):
        batch["labels"][:, step::3] = IGNORED
        batch["labels"][0] = IGNORED
    optim = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1, "max_norm": 0.3}
    return Case(Odd().double(), loss, batches, {"dp_shard": 2, "tp": 2}, optim)


# ---- state and chance ----------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Dropout of values in several placements, a count and an average kept in buffers."""

    seen: Tensor
    average: Tensor

    def __init__(self, vocabulary: int = 11, dim: int = 6, wide: int = 9):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocabulary, dim), nn.Dropout(0.3)
        self.up, self.down, self.head = nn.Linear(dim, wide), nn.Linear(wide, dim), nn.Linear(dim, vocabulary)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("average", torch.zeros(dim))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens))
        self.seen += tokens.shape[0]
        self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return self.head(x + self.drop(self.down(self.drop(self.up(x).relu()))))


def state() -> Case:
    """Return a case with random numbers that have to be the same on every mesh, and with buffers that steps change."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    batches = [random_ids(step, 11, 5, 3) for step in range(len(LRS))]
    for batch in batches:
        batch["labels"][1:3] = IGNORED
    optim = {"name": "sgd", "max_norm": 1e3}
    return Case(Stateful().double(), loss, batches, {"dp_replicate": 2, "tp": 2}, optim)


# ---- a loss in chunks ----------------------------------------------------------------------------------


class Capped(nn.Module):
    """A layer and a head with a bias and a soft-cap, which predicts all tokens but the first from those before."""

    def __init__(self, vocabulary: int = 11, dim: int = 6):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(vocabulary, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(tokens)).relu())
        return torch.tanh(logits[:, :-1] / 2.0) * 2.0


def chunks() -> Case:
    """Return a case of sequences and classes that no axis divides, in chunks of a token or two."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)

    batches = [random_ids(step, 11, 3, 4) for step in range(len(LRS))]
    for batch in batches:
        batch["labels"][1:, 2:] = IGNORED
    optim, passes = {"name": "sgd", "max_norm": None}, {"chunk_loss": {"chunks": 4}}
    return Case(Capped().double(), loss, batches, {"dp_shard": 2, "tp": 2}, optim, passes)


# ---- less precision ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers with a softmax between, which has to be computed in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(2))
        self.head = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).softmax(-1)
        return self.head(self.layers[1](x).relu())


def cast() -> Case:
    """Return a case of bf16 over fp32 masters, moments in fp32; compared with fp32 at a loose tolerance."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    generator = torch.Generator().manual_seed(4)
    batches = [
        {"x": torch.randn(7, 11, generator=generator).bfloat16(), "labels": torch.arange(7) % 5} for _ in LRS
    ]
    optim = {"name": "adamw", "eps": 1e-3, "max_norm": 1.0}
    passes = {"cast": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    return Case(Mixed(), loss, batches, {"dp_replicate": 2, "dp_shard": 2}, optim, passes, tolerance=5e-2)


# ---- experts ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of five experts a token, with biases."""

    def __init__(self, dim: int = 8, wide: int = 5, count: int = 5):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(19, dim), nn.LayerNorm(dim)
        self.router = nn.Linear(dim, count)
        self.up = nn.Parameter(torch.randn(count, dim, wide) / 2)
        self.down = nn.Parameter(torch.randn(count, wide, dim) / 2)
        self.bias = nn.Parameter(torch.randn(count, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(x).flatten(0, 1)
        weights, ids = self.router(y).softmax(-1).topk(2)
        ids, slots = ids.reshape(-1).sort()
        ends = torch.histc(ids.double(), bins=5, min=0, max=4).cumsum(0, dtype=torch.int32)
        rows = grouped(grouped(y[slots // 2], self.up, ends).relu(), self.down, ends) + self.bias[ids]
        places = torch.empty_like(slots)
        places[slots] = torch.arange(slots.shape[0])
        back = (rows * weights.reshape(-1)[slots, None])[places]
        return F.linear(x + back.view(-1, 2, x.shape[-1]).sum(1).view_as(x), self.embedding.weight)


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `F.grouped_mm`, which PyTorch itself does not run in fp64."""
    if torch.compiler.is_exporting():
        return F.grouped_mm(rows, weight, offs=ends)
    stops = ends.tolist()
    return torch.cat([rows[a:b] @ w for a, b, w in zip([0, *stops], stops, weight, strict=False)])


def experts() -> Case:
    """Return a case with tokens sorted by expert, padding on the last rank, and experts split inside."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    optim = {"name": "sgd", "momentum": 0.9, "max_norm": 1.0}
    batches = [random_ids(step, 19, 3, 5) for step in range(len(LRS))]
    return Case(Experts().double(), loss, batches, {"dp_shard": 2, "tp": 2}, optim)


# ---- images --------------------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions in groups, a border, batch and group norms, weights of frequencies."""

    def __init__(self, channels: int = 6, classes: int = 5):
        super().__init__()
        self.stem, self.seen = nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels)
        self.grouped = nn.Conv2d(channels, 2 * channels, 3, groups=3, bias=False)
        self.norm, self.back = nn.GroupNorm(3, 2 * channels), nn.ConvTranspose2d(2 * channels, channels, 2, groups=2)
        self.frequencies = nn.Parameter(torch.randn(channels, 4, 3, dtype=torch.complex128) / 2)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(channels * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.seen(self.stem(F.pad(x, (1, 1, 1, 1), value=0.5)).sigmoid())
        x = self.back(self.norm(self.grouped(x)).sigmoid())[:, :, :4, :4]
        x = torch.fft.irfft2(torch.fft.rfft2(x) * self.frequencies, s=(4, 4))
        return self.head(self.pool(x).flatten(1))


def images() -> Case:
    """Return a case of seven pictures over two ranks, with channels split over two others."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    generator = torch.Generator().manual_seed(5)
    batches = [{"x": torch.randn(7, 3, 5, 5, generator=generator).double(), "labels": torch.arange(7) % 5} for _ in LRS]
    optim = {"name": "sgd", "momentum": 0.9, "max_norm": 1.0}
    return Case(Images().double(), loss, batches, {"dp_shard": 2, "tp": 2}, optim)


CASES = {  # cheapest first
    "state": state,
    "odd": odd,
    "chunks": chunks,
    "images": images,
    "llama": llama,
    "rings": rings,
    "turns": turns,
    "context": context,
    "blocks": in_blocks,
    "cast": cast,
    "experts": experts,
}


def make(name: str) -> Case:
    """Return a case, the same at each call."""
    torch.manual_seed(0)
    return CASES[name]()


def random_ids(step: int, vocabulary: int, rows: int, tokens: int) -> Batch:
    """Return token ids and labels of a step."""
    generator = torch.Generator().manual_seed(step)
    return {key: torch.randint(0, vocabulary, (rows, tokens), generator=generator) for key in ("tokens", "labels")}


# ---- on one device -------------------------------------------------------------------------------------


def train_plainly(case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the metrics of each step and the final parameters and buffers, by eager PyTorch."""
    model = copy.deepcopy(case.model)
    optimizer, max_norm = optimizer_of(model, case.optim), case.optim["max_norm"]
    metrics = []
    for step, (batch, lr) in enumerate(zip(case.batches, LRS, strict=True)):
        parts = {key: value.to(dtype_of(model, value)).chunk(case.microbatches) for key, value in batch.items()}
        with keyed_dropout(step):
            losses = [case.loss(model, {k: v[i] for k, v in parts.items()}) for i in range(case.microbatches)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        metrics.append({"loss": torch.stack(losses).mean().item(), "grad_norm": norm.item()})
    return metrics, model.state_dict()


def dtype_of(model: nn.Module, value: Tensor) -> torch.dtype:
    """Return the model's dtype for floating-point values, the value's own for ids."""
    real = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(real) if value.is_floating_point() else value.dtype


def optimizer_of(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer of the same options, on the trained parameters."""
    arguments = {key: value for key, value in options.items() if key not in ("name", "max_norm")}
    trained = [p for p in model.parameters() if p.requires_grad]
    if options["name"] == "sgd":
        return torch.optim.SGD(trained, **arguments)
    return torch.optim.AdamW(trained, **{"betas": (0.9, 0.95), "weight_decay": 0.1, **arguments})


@contextmanager
def keyed_dropout(seed: int) -> Iterator[None]:
    """Replace PyTorch's dropout by the numbers that `passes/sharding/random.py` promises, computed independently."""
    sites = iter(range(1, 100))

    def dropout(x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        key = scrambled(seed ^ scrambled(next(sites) * 0x27D4EB2F & 0xFFFFFFFF))
        words = torch.tensor([scrambled(scrambled(i ^ key)) for i in range(x.numel())])
        return torch.where(((words >> 8) / 2.0**24 >= p).view(x.shape), x / (1 - p), 0.0)

    with mock.patch.object(F, "dropout", dropout):
        yield


def scrambled(word: int) -> int:
    """Return a 32-bit hash."""
    for _ in range(2):
        word = (word ^ word >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return word ^ word >> 16
