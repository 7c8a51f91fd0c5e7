"""Random operators draw the same numbers on every mesh, others in each step, with the distribution that they name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, compile_lockstep, trained_alike
from sweeps import in_turn
from torch import nn

from compiler_trainer import UserError
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.sharding import random
from passes.sharding.draws import exponential, integers, normal, uniform_between
from passes.sharding.random import global_index, uniform_at

MESHES = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}]
DRAWS = {  # operator -> (a call of it on x, its mean, its variance)
    "bernoulli": (lambda x: torch.empty_like(x).bernoulli_(0.7), 0.7, 0.21),
    "bernoulli_each": (lambda x: torch.full_like(x, 0.4).bernoulli(), 0.4, 0.24),
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.5), 1.0, 1.0),
    "exponential": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
    "normal": (lambda x: torch.empty_like(x).normal_(1.0, 2.0), 1.0, 4.0),
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), 0.5, 1 / 12),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 1 / 12),
    "randint": (lambda x: torch.randint(4, x.shape).to(x.dtype), 1.5, 1.25),
    "randint_between": (lambda x: torch.randint(-1, 3, x.shape, dtype=x.dtype), 0.5, 1.25),
    "randint_like": (lambda x: torch.randint_like(x, 1, 4), 2.0, 2 / 3),
    "randn": (lambda x: torch.randn(x.shape, dtype=x.dtype), 0.0, 1.0),
    "randn_like": (lambda x: torch.randn_like(x), 0.0, 1.0),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1.0, 3.0), 1.0, 16 / 12),
}


class Drawing(nn.Module):
    """Two linear layers with a random operator between them, active in training."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.draw = nn.Linear(6, 9), nn.Linear(9, 3), draw

    def forward(self, x):
        x = self.up(x).tanh()
        return self.down(x * self.draw(x) if self.training else x)


def loss(model, batch):
    return (model(batch["x"]) - 0.3).square().mean()


def data(*shape: int):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(*shape, generator=generator, dtype=torch.float64)} for _ in range(3)]


def losses(draw, mesh, **options):
    batches = data(5, 7, 6)
    step = compile_lockstep(Drawing(draw).double(), loss, batches[0], mesh, NO_DECAY, **options)
    return [step(batch, 1e-2)["loss"] for batch in batches]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.sample(1)
def test_what_is_drawn_is_the_same_on_every_mesh(name):
    wanted = losses(DRAWS[name][0], {})
    assert wanted != losses(DRAWS[name][0], {}, seed=1)
    for mesh in MESHES[-2:]:
        assert losses(DRAWS[name][0], mesh) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_of_every_dtype_are_in_their_range(dtype):
    seed, x = torch.tensor(5), torch.zeros(1 << 20, dtype=dtype)
    draws = {draw.__name__: draw(seed, 1, x) for draw in (normal, exponential, uniform_between)}
    assert all(values.dtype == dtype and values.isfinite().all() for values in draws.values())
    assert draws["exponential"].min() > 0 and draws["normal"].abs().max() > 4.5
    assert draws["uniform_between"].min() >= 0 and draws["uniform_between"].max() < 1
    assert uniform_between(seed, 1, x, -1.0, 3.0).max() < 3
    narrow = integers(seed, 1, torch.zeros(1 << 16, dtype=torch.int8), -100, 100)
    assert (narrow.min(), narrow.max()) == (-100, 99)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.sample(1)
def test_mean_and_variance_and_two_draws_that_differ(name):
    draw, mean, variance = DRAWS[name]

    class Moments(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.which = nn.Parameter(torch.ones((), dtype=torch.float64)), 0

        def forward(self, x):
            first, second = draw(x), draw(x)
            results = [first.mean(), first.var(), (first * second).mean() - first.mean() * second.mean()]
            return results[self.which] * self.weight

    model = Moments()
    batch = {"x": torch.ones(200, 100, dtype=torch.float64)}
    for model.which, wanted in enumerate((mean, variance, 0.0)):
        step = compile_lockstep(model, lambda m, b: m(b["x"]), batch, {}, NO_DECAY)
        results = [step(batch, 0.0)["loss"] for _ in range(2)]
        assert results[0] != results[1] and results == pytest.approx([wanted] * 2, abs=0.04 * max(1.0, variance))


def test_two_draws_of_each_kind_are_apart_in_any_test():
    """Each run tests only a few of the cases above."""
    seed, x = torch.zeros((), dtype=torch.int64), torch.zeros(20_000, dtype=torch.float64)
    first, second = (normal(seed, site, x) for site in (3, 4))
    assert abs((first * second).mean()) < 0.03 and abs(first.var() - 1) < 0.03
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[2].weight)
    batch = {"x": torch.ones(2000, 1)}
    step = compile_lockstep(model, lambda m, b: (m(b["x"]) > 0).float().mean() * m[2].weight.mean(), batch, {}, NO_DECAY)
    assert step(batch, 0.0)["loss"] == pytest.approx(0.25, abs=0.03)


def test_whole_numbers_of_a_wide_range_have_all_their_bits():
    numbers = integers(torch.zeros((), dtype=torch.int64), 0, torch.zeros(1000, dtype=torch.int64), 1 << 40)
    assert 400 < int((numbers % 2).sum()) < 600 and 0 <= int(numbers.min()) and int(numbers.max()) < 1 << 40


def test_a_step_that_draws_evaluates_without():
    batch = data(5, 7, 6)[0]
    model = Drawing(DRAWS["rand"][0]).double()
    step = compile_lockstep(model, loss, batch, {"dp_shard": 2}, NO_DECAY, evaluate=True)
    assert step.evaluate(batch) == pytest.approx(loss(model.eval(), batch).item(), abs=1e-12)


class Attention(nn.Module):
    """Grouped attention with a dropout rate so low that nothing is dropped."""

    def __init__(self, mask: str, p: float = 1e-12):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.out, self.mask, self.p = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6), mask, p

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 3)).permute(2, 0, 3, 1, 4)
        at = torch.arange(x.shape[1])
        masks = {"some rows": (at[:, None] > at), "added": (at[:, None] - at).to(x.dtype) / 3}
        mask, p = masks.get(self.mask), self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, p, self.mask == "causal", scale=0.4, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("mask", "mesh"), in_turn(["none", "causal", "some rows", "added"], MESHES), ids=str)
@pytest.mark.sample(1)
def test_attention_that_drops_out_is_attention(mask, mesh):
    model, batches = nn.Sequential(Attention(mask), Attention(mask)).double(), data(3, 7, 6)
    step = trained_alike(model, loss, batches, mesh, NO_DECAY, evaluate=True)
    model.load_state_dict(step.state_dict())  # evaluation runs PyTorch's attention, but over cp a ring, with another layout
    assert step.evaluate(batches[0]) == pytest.approx(loss(model.eval(), batches[0]).item(), abs=1e-10)


@pytest.mark.full
def test_attention_drops_the_same_on_every_mesh():
    def loss_of(mesh, p):
        batches = data(3, 7, 6)
        step = compile_lockstep(Attention("causal", p).double(), loss, batches[0], mesh, NO_DECAY)
        return [step(batch, 1e-2)["loss"] for batch in batches]

    wanted = loss_of({}, 0.3)
    assert wanted != pytest.approx(loss_of({}, 1e-12), abs=1e-3)
    for mesh in MESHES:
        assert loss_of(mesh, 0.3) == pytest.approx(wanted, abs=1e-12)


def test_what_is_drawn_otherwise_is_refused_by_name():
    with pytest.raises(UserError, match=r"normalize: %randperm \(test_draws.py:\d+\) aten.randperm.default draws random numbers"):
        losses(lambda x: torch.randperm(x.shape[-1]), {})


def test_the_first_entry_is_no_exception_in_the_first_step_of_the_first_seed():
    zero = torch.zeros((), dtype=torch.int64)
    first = [float(uniform_at(zero, zero + (seed << 32), site)) for seed in range(16) for site in range(4)]
    assert min(first) > 0 and 0.4 < sum(first) / len(first) < 0.6


@pytest.mark.parametrize("most", [0, random.MOST])
def test_entries_of_a_shard_have_the_indices_of_the_full_tensor(most, monkeypatch):
    """Also if they are kept in 64 bits, as for tensors of more than 2^31 - 1 entries."""
    monkeypatch.setattr(random, "MOST", most)
    mesh, full = Mesh.of({"dp_shard": 3, "tp": 2}), torch.arange(120).view(6, 5, 4)
    spec = Spec(((Factor(6, ("dp_shard",)),), (Factor(5),), (Factor(4, ("tp",)),)))
    for i in range(3):
        for j in range(2):
            places = {"dp_shard": torch.tensor(i), "tp": torch.tensor(j)}
            index = global_index(spec, mesh, places, torch.device("cpu"))
            assert torch.equal(index, full[2 * i : 2 * i + 2, :, 2 * j : 2 * j + 2])
