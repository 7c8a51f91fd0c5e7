"""Uneven shards under operators that could read their padding, and operators whose plain meaning is easy to miss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from mixture import TOP, WIDTH, Mixture, grouped, sequences
from oracle import NO_DECAY, compile_lockstep, squared_error, trained_alike
from torch import nn

from compiler_trainer import UserError
from passes.rules import RULES, add_rule
from passes.rules.base import from_text

DP, TP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}


@torch.library.custom_op("padding::add", mutates_args=())
def _add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


_add.register_fake(lambda x, y: torch.empty_like(x))
_add.register_autograd(lambda ctx, g: (g.clone(), g.clone()))
add_rule("padding::add", "...d, ...d -> ...d; linear 0 1")


class Small(nn.Module):
    """Linear layers of given sizes, and a function of them and the batch."""

    def __init__(self, function, sizes=((6, 4),), bias=True, **parameters: torch.Size):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in sizes)
        self.extra = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in parameters.items()})

    def forward(self, batch):
        return self.function(self, batch)


def loss(model, batch):
    return model(batch).square().mean()


def data(*shape: int):
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        mask = torch.rand(shape[0], 4, generator=generator) > 0.5
        mask[:, 0] = True
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        batches.append({"x": x, "mask": mask, "ids": torch.randint(1, 9, (shape[0],), generator=generator)})
    return batches


def gram(m, b):
    u, d, v, e = m.layers
    return torch.bmm(d(u(b["x"]).tanh()).mT, e(v(b["x"]).tanh()))


def added(m, b):
    u, v, d = m.layers
    return d(torch.ops.padding.add(u(b["x"]), v(b["x"]).cos()))


def hidden(m, b):
    return m.layers[0](b["x"]) + torch.where(b["mask"], 0.0, -math.inf)


CASES = {
    "bits as integers": (lambda m, b: m.layers[0](((b["x"].view(torch.int64) + 12345) % 7).double()), (4, 6), {}),
    "bits of shards": (lambda m, b: m.layers[0](((b["x"].view(torch.int64) + 12345) % 7).double()), (5, 6), DP),
    "bits in halves": (lambda m, b: m.layers[0]((b["x"].view(torch.int32)[:, ::2] % 7).double()), (5, 6), DP),
    "truncated to bf16": (lambda m, b: m.layers[0]((b["x"].float().view(torch.int32) & -65536).view(torch.float32).double()), (5, 6), DP),
    "a largest bool": (lambda m, b: m.layers[0]((b["x"] > 1.5).amax(1, keepdim=True).double().expand(-1, 5, 6)), (6, 5, 6), {"cp": 2}),
    "logsumexp of masked": (lambda m, b: torch.logsumexp(hidden(m, b), -1), (5, 6), DP),
    "cross-entropy of masked": (lambda m, b: F.cross_entropy(hidden(m, b), b["ids"] * 0), (5, 6), DP),
    "remainder of a number": (lambda m, b: m.layers[0](b["x"]) * (12 % b["mask"].sum(-1, keepdim=True)), (5, 6), DP),
    "ids minus one": (lambda m, b: F.embedding(b["ids"] - 1, m.extra["table"].double()) + m.layers[0](b["x"]), (5, 6), DP),
    "gathered by ids minus one": (lambda m, b: m.layers[0](b["x"]).gather(1, (b["ids"] - 1)[:, None] % 4), (5, 6), DP),
    "no bias": (lambda m, b: torch.addmm(torch.full((4,), math.nan, dtype=torch.float64), b["x"], m.layers[0].weight.t(), beta=0), (4, 6), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_eager_pytorch(case):
    function, shape, mesh = CASES[case]
    model = Small(function, table=(8, 4)).double()
    trained_alike(model, loss, data(*shape), mesh, NO_DECAY)


@pytest.mark.parametrize(("rows", "mesh"), [(5, {"cp": 2, "tp": 2}), (7, {"cp": 2, "tp": 3})], ids=str)
def test_a_shard_that_is_cut_again_has_no_padding_of_zeros(rows, mesh):
    model = Small(gram, ((6, 12), (12, 4), (6, 12), (12, 4)), bias=False).double()
    trained_alike(model, loss, data(2, rows, 6), mesh, NO_DECAY)


@pytest.mark.parametrize("function", [torch.cos, torch.sigmoid])
def test_padding_after_a_conversion_is_zero(function):
    model = Small(lambda m, b: m.layers[1](function(b["x"]) - function(m.layers[0](b["x"]))), ((7, 7), (7, 4)), bias=False).double()
    trained_alike(model, loss, data(5, 7), BOTH, NO_DECAY)


def test_a_sum_has_zeros_as_padding_only_if_all_terms_have():
    model = Small(added, ((6, 7), (6, 7), (7, 4)), bias=False).double()
    plan = {"layers.[01].weight": {"tp": 0}, "layers.2.weight": {"tp": 1}}
    trained_alike(model, loss, data(5, 6), TP, NO_DECAY, passes={"shard": {"plan": plan}})
    rule = from_text("...d, ...d -> ...d; linear 0 1")
    assert RULES["padding::add"] is not None and rule is not None


def test_a_table_of_several_books_is_looked_up():
    model = Small(lambda m, b: m.layers[0](F.embedding(b["ids"], m.extra["books"].view(-1, 6).double())), books=(3, 3, 6)).double()
    trained_alike(model, loss, data(5, 6), TP, NO_DECAY, passes={"shard": {"plan": {"extra.books": {"tp": 0}}}})


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_that_draws_numbers_is_refused():
    model = Small(lambda m, b: Noise.apply(m.layers[0](b["x"]))).double()
    with pytest.raises(UserError, match="Noise.* draws random numbers; draw the numbers outside of it"):
        compile_lockstep(model, loss, data(4, 6)[0], {}, NO_DECAY)


class Twice(Mixture):
    """Some tokens choose the same expert twice."""

    def experts(self, x):
        scores = self.router(x).softmax(-1)
        _, ids = scores.topk(2)
        ids = torch.stack([ids[:, 0], torch.where(x[:, 0] > 0, ids[:, 0], ids[:, 1])], 1)
        weights, (ids, order) = scores.gather(1, ids), ids.reshape(-1).sort()
        ends = self.counts(ids, self.up.shape[0]).cumsum(0, dtype=torch.int32)
        gate, up = grouped(x[order // TOP], self.up.transpose(1, 2), ends).chunk(2, -1)
        rows = grouped(F.silu(gate) * up, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return self.back(rows, order).view(-1, TOP, WIDTH).sum(1)


@pytest.mark.parametrize("dispatch", ["all_gather", "dropless"])
def test_no_row_is_dropped_if_a_token_chooses_an_expert_twice(dispatch):
    torch.manual_seed(0)
    model = Twice(experts=2).double()
    trained_alike(model, squared_error, sequences(), {"dp_shard": 2, "ep": 2}, NO_DECAY, passes={"moe": {"dispatch": dispatch}})
