"""Random small models on random meshes, sizes and plans: loss and every gradient equal one device's in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_harness import compare
from torch import Tensor, nn
from verified import apply

from compiler_trainer.capture.capture import capture
from passes.autograd.joint import Joint
from passes.check.simulate import Lockstep
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import shard, unshard
from passes.sharding.collectives import Collectives
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard

TOLERANCE = 1e-10
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model and its batch."""

    batch: int
    time: int
    kv_heads: int
    groups: int
    width: int  # of a head
    hidden: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.kv_heads * self.groups

    @property
    def dim(self) -> int:
        """The width of the residual stream."""
        return self.heads * self.width


class Attention(nn.Module):
    """Grouped causal attention with separate projections."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.wq, self.wo = nn.Linear(s.dim, s.dim, bias=False), nn.Linear(s.dim, s.dim)
        self.wk, self.wv = (nn.Linear(s.dim, s.kv_heads * s.width) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.s.width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.s.groups > 1)
        return self.wo(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Hand-written attention from one projection: split, matmul, mask, softmax."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.qkv, self.out = nn.Linear(s.dim, 3 * s.dim), nn.Linear(s.dim, s.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.s.heads, -1)).transpose(1, 2) for y in self.qkv(x).split(self.s.dim, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT / self.s.width**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape):
        super().__init__()
        self.w1, self.w3 = nn.Linear(s.dim, s.hidden, bias=False), nn.Linear(s.dim, s.hidden)
        self.w2 = nn.Linear(s.hidden, s.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Rows(nn.Module):
    """A two-layer perceptron over the flattened rows."""

    def __init__(self, s: Shape):
        super().__init__()
        self.up, self.down = nn.Linear(s.dim, s.hidden), nn.Linear(s.hidden, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.flatten(0, 1)))).view(x.shape)


class Mixed(nn.Module):
    """Reductions, scans, cuts and joins of the stream."""

    def __init__(self, s: Shape):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(s.dim))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2:]
        turned = torch.cat([right, -left], -1) * self.scale
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return turned + past - x.mean(1, keepdim=True) + x.std(-1, keepdim=True) * x.sigmoid().amax(-1, keepdim=True)


class Memory(nn.Module):
    """A soft look-up in a learned table, and a bias by position."""

    def __init__(self, s: Shape):
        super().__init__()
        self.table, self.place = nn.Parameter(torch.randn(s.hidden, s.dim)), nn.Embedding(s.time, s.dim)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("bth,hd->btd", torch.einsum("btd,hd->bth", x, self.table).softmax(-1), self.table)
        return mixed + self.place(torch.arange(x.shape[1])).exp().log1p()


BLOCKS = {c.__name__: c for c in (Attention, Fused, Gated, Memory, Mixed, Rows)}
NORMS = {"rms": lambda d: nn.RMSNorm(d, eps=1e-6), "layer": nn.LayerNorm, "none": lambda d: nn.Identity()}


class Model(nn.Module):
    """Embedding, residual blocks each after a norm, logits; `tied` shares the embedding with the logits."""

    def __init__(self, s: Shape, blocks: list[tuple[str, str]], tied: bool):
        super().__init__()
        self.embed = nn.Embedding(s.vocabulary, s.dim)
        self.norms = nn.ModuleList(NORMS[norm](s.dim) for norm, _ in blocks)
        self.blocks = nn.ModuleList(BLOCKS[block](s) for _, block in blocks)
        self.logits = nn.Linear(s.dim, s.vocabulary, bias=not tied)
        if tied:
            self.logits.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        return self.logits(x)


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over labels that are not ignored."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean squared logit, weighted by the label."""
    return (model(batch["tokens"]).square().mean(-1) * (batch["labels"] + 101)).mean()


SHAPES = st.builds(Shape, st.integers(1, 5), st.integers(2, 9), st.integers(1, 3), st.integers(1, 3), st.integers(2, 3),
                   st.integers(3, 11), st.integers(3, 13))
MESHES = st.fixed_dictionaries({"dp_replicate": st.integers(1, 2), "dp_shard": st.integers(1, 3), "tp": st.integers(1, 8)})
MESHES = MESHES.filter(lambda m: 1 < m["dp_replicate"] * m["dp_shard"] * m["tp"] <= 8)
LISTS = st.lists(st.tuples(st.sampled_from(sorted(NORMS)), st.sampled_from(sorted(BLOCKS))), min_size=1, max_size=2)


def difference(model: nn.Module, loss_fn, batch: dict[str, Tensor], mesh: dict[str, int], plan, sequence_parallel: bool) -> None:
    """Assert that lockstep ranks compute the loss and gradients of one device."""
    program, ctx = capture(model, loss_fn, batch, CPU)
    program = replace(program, mesh=Mesh.of(mesh))
    program, _ = apply((Normalize(), Place(plan), Shard(sequence_parallel), Joint(), Collectives()), program, ctx)
    loss = loss_fn(model, batch)
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    wanted = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(model.named_parameters(), gradients)}
    assert names == [o.name for o in program.outputs if o.kind == "gradient"]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    outs = Lockstep(program).run([[_given(i, state, program, place) for i in program.inputs] for place in program.mesh])
    for k, output in enumerate(program.outputs):
        want = loss.detach() if output.kind == "loss" else wanted[output.name]
        compare(f"{output.kind} {output.name}", unshard([o[k] for o in outs], output.spec, program.mesh), want, TOLERANCE)


def _given(i: ir.Input, state: dict[str, Tensor], program: ir.Program, place: dict[str, int]) -> Tensor:
    return torch.tensor(place[i.name]) if i.kind == "coordinate" else shard(state[i.name].detach(), i.spec, program.mesh, place)


@st.composite
def plans(draw, model: nn.Module, inferred: bool) -> dict[str, dict[str, int]] | None:
    """Draw no plan, or for each parameter a dim on tp or none."""
    if inferred:
        return None
    dims = {n: draw(st.sampled_from([None, *range(p.dim())]), label=n) for n, p in model.named_parameters()}
    return {name: {"tp": d} for name, d in dims.items() if d is not None}


def build(data, shape: Shape, blocks, tied: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model with random weights and its batch; some labels are ignored, at least one is not."""
    torch.manual_seed(0)
    model = Model(shape, blocks, tied).double()
    tokens, labels = (torch.randint(shape.vocabulary, (shape.batch, shape.time)) for _ in range(2))
    labels[: data.draw(st.integers(0, shape.batch - 1), label="ignored rows")] = -100
    return model, {"tokens": tokens, "labels": labels}


def check_one(data, shape: Shape, mesh, blocks, tied: bool, loss_fn, sequence_parallel: bool, inferred: bool) -> None:
    """Compare one random model with one device."""
    model, batch = build(data, shape, blocks, tied)
    difference(model, loss_fn, batch, mesh, data.draw(plans(model, inferred)), sequence_parallel)


ARGUMENTS = dict(data=st.data(), shape=SHAPES, mesh=MESHES, blocks=LISTS, tied=st.booleans(),
                 loss_fn=st.sampled_from([cross_entropy, squares]), sequence_parallel=st.booleans(), inferred=st.booleans())
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(**ARGUMENTS)
@pytest.mark.full
def test_random_models(data, shape, mesh, blocks, tied, loss_fn, sequence_parallel, inferred):
    check_one(data, shape, mesh, blocks, tied, loss_fn, sequence_parallel, inferred)


@pytest.mark.full
@pytest.mark.timeout(3600)
@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(**ARGUMENTS)
def test_many_random_models(data, shape, mesh, blocks, tied, loss_fn, sequence_parallel, inferred):
    check_one(data, shape, mesh, blocks, tied, loss_fn, sequence_parallel, inferred)
