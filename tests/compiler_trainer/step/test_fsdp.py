"""FSDP with a sharded sequence: parameters are sharded over `dp_shard` and `cp` as one axis."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
from oracle import (
    ADAMW,
    NO_DECAY,
    SEQ_LEN,
    assert_same,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    train_plainly,
    train_step,
    trained_alike,
)
from stored_state import saved
from sweeps import quick
from torch import nn

from compiler_trainer import checkpoint
from compiler_trainer.config.errors import UserError

F64 = torch.float64
N_LAYERS = 2


@functools.cache
def plain(optim: str = "adamw", microbatches: int = 1, tied: bool = False, kv_heads: int = 1):
    """Return metrics and parameters after three steps on one device."""
    rows = 4 if microbatches > 1 else 5
    how = ADAMW if optim == "adamw" else {"name": "sgd", "momentum": 0.9}
    return train_plainly(llama(N_LAYERS, tied=tied, n_kv_heads=kv_heads), llama_loss, batches(rows=rows), how, microbatches)


def trained(mesh: dict[str, int], microbatches: int = 1, tied: bool = False, kv_heads: int = 1, **passes):
    """Return the step after three steps, which equal those of one device."""
    data = batches(rows=4 if microbatches > 1 else 5)
    model = llama(N_LAYERS, tied=tied, n_kv_heads=kv_heads)
    step = compile_lockstep(model, llama_loss, data[0], mesh, ADAMW, microbatches=microbatches,
                            passes={"verify": "spec", **passes})
    metrics, state = plain(microbatches=microbatches, tied=tied, kv_heads=kv_heads)
    for ours, theirs in zip(train_step(step, data), metrics, strict=True):
        assert_same(ours, theirs, 1e-9)
    assert_same(step.state_dict(), state, 1e-8)
    return step


MESHES = [
    {"cp": 2, "dp_shard": 2},
    {"cp": 2},
    {"cp": 2, "dp_shard": 2, "tp": 2},
    {"cp": 2, "dp_shard": 2, "dp_replicate": 2},
    {"cp": 3, "dp_shard": 2},
]


@pytest.mark.parametrize("mesh", quick(MESHES, 2, 3), ids=str)
@pytest.mark.sample(1)
def test_it_trains_as_one_device_does(mesh):
    trained(mesh)


@pytest.mark.parametrize(("method", "mesh", "kv_heads"), quick([
    ("ring", {"cp": 2, "dp_shard": 2}, 1), ("all_gather", {"cp": 2, "dp_shard": 2}, 1),
    ("ulysses", {"cp": 2, "dp_shard": 2}, 1), ("hybrid", {"cp": 4}, 2),
], 2), ids=str)
def test_whatever_attention_does_over_the_sequence(method, mesh, kv_heads):
    trained(mesh, kv_heads=kv_heads, context={"method": method})


@pytest.mark.parametrize("options", quick([
    {"microbatches": 2},
    {"remat": {"policy": "full"}},
    {"remat": {"regather": False}},
    {"communication": {"bucket_mib": 0}},
    {"shard": {"min_shard_elements": 100}},
    {"shard": {"min_shard_elements": 10**9}},
    {"tied": True},
], 0, 2, 6), ids=str)
@pytest.mark.sample(1)
def test_whatever_else_the_passes_do(options):
    trained({"cp": 3, "dp_shard": 2}, **options)


# ---- parameters that are not used on tokens ---------------------------------------------------------


class Odd(nn.Module):
    """Parameters along the sequence, with rows only, of other parameters, frozen, unused and of one entry; a buffer."""

    def __init__(self):
        super().__init__()
        self.positions, self.rows = nn.Parameter(torch.randn(SEQ_LEN, 5)), nn.Linear(3, 5)
        self.left, self.right = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 5))
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.out = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x, rows):
        x = x + self.positions + torch.tanh(self.rows(rows))[:, None]
        weight = self.left @ self.right / (self.left.square().sum() + self.right.abs().amax())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        x = nn.functional.linear(x, weight) * self.scale + self.frozen - self.mean
        return self.out(torch.tanh(x)) * self.positions.softmax(0)


def odd_loss(model, batch):
    return (model(batch["x"], batch["rows"]) - batch["y"]).square().mean()


ODD_MESHES = [
    {"cp": 2}, {"cp": 2, "dp_shard": 2}, {"cp": 3, "dp_shard": 2}, {"cp": 2, "dp_shard": 2, "dp_replicate": 2},
]


@pytest.mark.parametrize(("mesh", "least"), quick(product(ODD_MESHES, [1, 6]), 3, 6), ids=str)
def test_parameters_of_all_kinds_have_their_gradients(mesh, least):
    torch.manual_seed(0)
    model = Odd().double()
    shapes = {"x": (4, SEQ_LEN, 5), "rows": (4, 3), "y": (4, SEQ_LEN, 5)}
    data = [{key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()} for _ in range(3)]
    metrics, state = train_plainly(model, odd_loss, data, NO_DECAY)
    step = compile_lockstep(model, odd_loss, data[0], mesh, NO_DECAY,
                            passes={"verify": "numeric", "shard": {"min_shard_elements": least}})
    for ours, theirs in zip(train_step(step, data), metrics, strict=True):
        assert_same(ours, theirs, 1e-9)
    assert_same(step.state_dict(), state, 1e-9)


# ---- storage ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_rank_holds_its_part_of_parameters_and_moments_in_their_own_order():
    data = batches(rows=4)
    for mesh, ranks in (({"cp": 2, "dp_shard": 2}, 4), ({"cp": 3}, 3)):
        step = compile_lockstep(llama(), llama_loss, data[0], mesh, ADAMW)
        assert step.train["step"].program.order.zigzag  # attention is causal
        table = llama().state_dict()["tok_embeddings.weight"]
        rows = -(-len(table) // ranks)
        for rank, local in step.state["model.tok_embeddings.weight"].local.items():
            mine = table[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(local[: len(mine)], mine, rtol=0, atol=0)
        for name, state in step.state.items():
            if name != "optim.step":
                assert state.spec.sharded == ("fsdp",), name
                assert state.local[0].shape[0] == -(-state.spec.shape[0] // ranks)


@pytest.mark.sample(1)
@pytest.mark.parametrize("there", quick([{"dp_shard": 4}, {"cp": 2}, {"tp": 2}, {"cp": 2, "dp_shard": 2}, {}], 3), ids=str)
def test_a_checkpoint_is_resharded_when_it_is_loaded(tmp_path, there):
    data = batches(rows=5)
    first = compile_lockstep(llama(), llama_loss, data[0], {"cp": 3, "dp_shard": 2}, ADAMW)
    train_step(first, data)
    path = saved(first, tmp_path)
    other = compile_lockstep(llama(), llama_loss, data[0], there, ADAMW)
    checkpoint.load(other, checkpoint.opened(path))
    assert_same(other.state_dict(), first.state_dict(), 0)
    assert_same(train_step(other, data)[-1], train_step(first, data)[-1], 1e-9)


def test_a_plan_on_an_axis_that_does_not_exist_is_refused():
    plan = {"layers.0.attention.wq.weight": {"TP": 0}}
    with pytest.raises(UserError, match="wq.weight is sharded on 'TP', which is no axis; use tp or ep"):
        compile_lockstep(llama(), llama_loss, batches()[0], {"tp": 2}, passes={"shard": {"plan": plan}})


@pytest.mark.parametrize("axis", ["cp", "dp_shard"])
def test_a_plan_that_shards_a_parameter_where_it_is_stored_is_refused(axis):
    plan = {"layers.0.attention.wq.weight": {axis: 0}}
    message = f"layers.0.attention.wq.weight is sharded on {axis}, but parameters are always stored over dp_shard and cp"
    with pytest.raises(UserError, match=message):
        compile_lockstep(llama(1), llama_loss, batches(1)[0], MESHES[0], passes={"shard": {"plan": plan}})


class Rotated(nn.Module):
    """A layer with a complex weight."""

    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(4, dtype=torch.complex128)), nn.Linear(4, 2, dtype=F64)

    def forward(self, x):
        return self.out((torch.complex(x, x.flip(-1)) * self.w).real)


def test_a_complex_weight_is_sharded_and_updated_as_in_eager_pytorch():
    torch.manual_seed(0)
    model, x = Rotated(), torch.randn(4, 5, 4, dtype=F64)

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    step = compile_lockstep(model, loss, {"x": x}, {"dp_shard": 2}, {"name": "sgd", "lr": 0.1, "max_norm": None})
    value = loss(model, {"x": x})
    value.backward()
    assert step({"x": x})["loss"] == pytest.approx(value.item(), abs=1e-12)
    assert step.state["model.w"].spec.sharded
    assert_same({"w": step.state_dict()["w"]}, {"w": (model.w - 0.1 * model.w.grad).detach()}, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "microbatches", "passes"), quick([
    ({"dp_shard": 2, "tp": 2}, 1, {}),
    ({"pp": 2, "dp_shard": 2}, 2, {"accumulate": {"gather": "step", "reduce": "step"}}),
    ({"cp": 2, "dp_shard": 2}, 4, {}),  # one sample a microbatch, which `dp_shard` does not divide
    ({"cp": 2, "dp_shard": 2}, 2, {"remat": {"policy": "full"}}),
    ({"dp_shard": 3}, 1, {"chunk_loss": {"chunks": 2}}),
    ({"dp_replicate": 2, "tp": 2}, 1, {}),
], 0, 1))
def test_parameters_that_are_not_trained_are_sharded_too(mesh, microbatches, passes):
    model = llama(N_LAYERS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "wo" in name)
    step = trained_alike(model, llama_loss, batches(rows=4), mesh, NO_DECAY, microbatches, passes=passes, evaluate=True)
    assert step.evaluate(batches(rows=4)[0])
    whole = compile_lockstep(llama(N_LAYERS), llama_loss, batches(rows=4)[0], mesh, microbatches=microbatches, passes=passes)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen and all(step.state[f"model.{n}"].spec == whole.state[f"model.{n}"].spec for n in frozen)


class Follower(nn.Module):
    """A student that learns from an average of itself, which only training changes."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            expected = self.teacher(x).tanh()
            if self.training:
                self.teacher.weight.mul_(0.5).add_(0.5 * self.student.weight)
        return self.student(x) - expected


def loss_of_follower(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
def test_a_frozen_parameter_that_the_model_writes_is_read_by_evaluation(mesh):
    torch.manual_seed(1)
    model, data = Follower().double(), [{"x": torch.randn(4, 6, dtype=torch.float64)} for _ in range(3)]
    step = trained_alike(model, loss_of_follower, data, mesh, NO_DECAY, evaluate=True)
    model.load_state_dict(step.state_dict())
    assert step.evaluate(data[0]) == pytest.approx(loss_of_follower(model.eval(), data[0]).item(), abs=1e-12)
