"""Initial weights: each slice equals that of the full tensor, and a rank draws only the entries it stores."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from oracle import compile_lockstep

from compiler_trainer import models
from compiler_trainer.config.schema import ExpertsConfig, ModelConfig
from compiler_trainer.models import init
from compiler_trainer.models.init import CHUNK, Normal
from compiler_trainer.step.runtime import LockstepRanks
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec, shard, unshard

SHAPES = [(), (1,), (7,), (2 * CHUNK + 5,), (3, CHUNK + 3), (300, 401), (5, 37, 51), (0, 4)]


def normal(shape, std=0.02, seed=77, dtype=torch.float32):
    return Normal(shape, dtype, std, seed)


def slice_of(size: int, draw: random.Random) -> slice:
    first, last = sorted((draw.randint(0, size), draw.randint(0, size)))
    return slice(first, last)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_slice_is_what_the_full_tensor_has_there(shape):
    value, draw = normal(shape), random.Random(0)
    full = value[()]
    assert full.shape == shape and full.isfinite().all()
    for _ in range(40):
        index = tuple(slice_of(size, draw) for size in shape)
        assert torch.equal(value[index], full[index]), index


def test_numbers_are_normal_and_independent():
    x = normal((1 << 20,), std=1.0)[()].double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((x**power).mean() - moment) < 0.02, power
    assert 4.5 < x.abs().max() < 6
    for lag in (1, 2, CHUNK):
        assert abs((x[:-lag] * x[lag:]).mean()) < 0.005, lag


def test_the_numbers_of_a_seed_stay_the_same():
    expected = torch.tensor([0.691625476, -0.957200766, -1.384391665, -0.494517028, 0.260684133])
    torch.testing.assert_close(normal((5,), std=1.0, seed=0)[()], expected, rtol=0, atol=1e-6)


def test_threads_change_nothing(monkeypatch):
    value = normal((700, 401))
    single = value[()]
    monkeypatch.setattr(init, "cores", lambda: 5)
    assert torch.equal(value[()], single)


@pytest.fixture
def counted(monkeypatch):
    """Count the entries drawn so far, two for each number of a generator."""
    drawn, bits = [0], init.bits

    def counting(seed, spans):
        drawn[0] += sum(2 * (end - first) for first, end in spans)
        return bits(seed, spans)

    monkeypatch.setattr(init, "bits", counting)
    return drawn


@pytest.mark.parametrize(
    "dims", [((7, ("dp",)), (10, ("tp",))), ((10, ("tp", "dp")), (6, ())), ((10, ("dp",)), (9, ()))], ids=str
)
def test_a_rank_draws_the_entries_that_it_stores(dims, counted):
    mesh = Mesh.of({"dp_shard": 3, "tp": 2})
    spec = Spec(tuple((Factor(size, tuple({"dp": "dp_shard"}.get(axis, axis) for axis in axes)),) for size, axes in dims))
    value = normal(spec.shape)
    full, locals_ = value[()], []
    for place in mesh:
        counted[0] = 0
        local = shard(value, spec, mesh, place)
        rows = local.shape[0] if local.shape[1] < spec.shape[1] else 1
        assert counted[0] <= local.numel() + 2 * rows, place
        locals_.append(local)
    assert torch.equal(unshard(locals_, spec, mesh), full)


MODEL = ModelConfig(dim=24, n_layers=4, n_heads=2, n_kv_heads=1, ffn_dim=37, vocab_size=61)
EXPERTS = replace(MODEL, n_layers=1, experts=ExpertsConfig(6, 2, 20))
CASES = {
    "uneven": ({"dp_shard": 3}, MODEL),
    "columns": ({"dp_shard": 2, "tp": 2}, MODEL),
    "stages": ({"pp": 2, "dp_shard": 2}, MODEL),
    "experts": ({"dp_shard": 2, "ep": 2}, EXPERTS),
}


def step_on(mesh, cfg):
    """Return a step whose ranks drew their weights."""
    batch = {key: torch.zeros(8, 8, dtype=torch.int64) for key in models.INPUTS}
    initial = models.initial_parameters(models.build(cfg), 3, torch.float32)
    return compile_lockstep(models.build(cfg), models.loss_fn, batch, mesh, initial=initial, microbatches=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_same_on_any_mesh(case):
    mesh, cfg = CASES[case]
    state = step_on(mesh, cfg).state_dict()
    for name, value in models.initial_parameters(models.build(cfg), 3, torch.float32):
        assert torch.equal(state[name], value[()]), name


def test_a_rank_draws_nothing_of_other_stages(monkeypatch, counted):
    everyone = LockstepRanks.__init__

    def first_alone(self, mesh):
        everyone(self, mesh)
        self.ranks = (0,)

    monkeypatch.setattr(LockstepRanks, "__init__", first_alone)
    step = step_on({"pp": 2, "dp_shard": 2}, MODEL)
    stored = sum(s.local[0].numel() for name, s in step.state.items() if name.startswith("model.") and 0 in s.local)
    total = sum(parameter.numel() for parameter in models.build(MODEL).parameters())
    assert counted[0] <= stored < 0.3 * total
