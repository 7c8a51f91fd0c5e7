"""The optimizer on shards: the norm of the full gradient, and padding that stays zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from oracle import (
    ADAMW,
    LRS,
    assert_same,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    perceptron,
    points,
    squared_error,
    train_step,
)
from torch import Tensor, nn

from compiler_trainer import compile_step
from passes.ir import ir
from passes.ir.printer import op_name
from passes.update.optimizers import SGD, AdamW, Moment

MESHES = [{"dp_shard": 3}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}]


class Scaled(nn.Module):
    """A model with parameters of 1, 2 and 5 rows: of four ranks, three own no row of the first, one none of the last."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.arange(1.0, n + 1).double()) for n in (1, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :5] * self.c).sum(1) + (x[:, 5:7] * self.b).sum(1) + x[:, 7] * self.a


def scaled() -> tuple[Scaled, dict[str, Tensor]]:
    return Scaled(), {"x": torch.arange(1.0, 25.0, dtype=torch.float64).view(3, 8)}


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).mean()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.sample(2)
def test_the_norm_is_that_of_the_whole_gradient(mesh, max_norm):
    model, batch = scaled()
    step = compile_lockstep(model, mean, batch, mesh, {"name": "sgd", "max_norm": max_norm})
    gradient = batch["x"].mean(0)  # c, b and a enter linearly
    norm = math.sqrt(gradient.square().sum())
    assert step(batch, lr=0.1)["grad_norm"] == pytest.approx(norm, rel=1e-12)
    factor = 1.0 if max_norm is None else max_norm / (norm + 1e-6)  # as in clip_grad_norm_
    c, b, a = (0.1 * factor * gradient).split([5, 2, 1])
    wanted = {"a": model.a - a, "b": model.b - b, "c": model.c - c}
    assert_same(step.state_dict(), {name: value.detach() for name, value in wanted.items()}, 1e-12)


class Scalar(nn.Module):
    """A model with a scalar parameter, whose gradient has the shape of a norm."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.arange(1.0, 9.0) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1) * self.scale


def test_the_norm_is_not_reduced_in_the_dtype_of_gradients():
    batch = {"x": torch.arange(1.0, 17.0).view(2, 8)}
    programs = {}
    compile_step(Scalar(), mean, batch, mesh={"dp_shard": 2}, optim={"name": "sgd"}, ranks="lockstep",
                 passes={"cast": {"reduce_dtype": "bfloat16"}},
                 observe=lambda program, record: programs.update({record.name: program}))
    reduced = [node.args[1:] for node in programs["optimize"].calls() if op_name(node.target) == "psum"]
    assert ("dp_shard", torch.float32, torch.bfloat16) in reduced, "the gradient of the scalar"
    assert ("dp_shard", torch.float32, None) in reduced, "the squared norm"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_a_gradient_below_the_limit_is_not_scaled(mesh):
    model, batch = scaled()
    loose, free = (compile_lockstep(model, mean, batch, mesh, {"name": "sgd", "max_norm": n}) for n in (1e6, None))
    assert loose(batch) == free(batch)
    assert_same(loose.state_dict(), free.state_dict(), 0)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_padding_of_parameters_and_moments_stays_zero(microbatches):
    data = batches(rows=6)
    step = compile_lockstep(llama(), llama_loss, data[0], {"dp_shard": 4}, microbatches=microbatches)
    train_step(step, data)
    padded = 0
    for spec, by_rank in step.tensors().values():
        if not spec.padded(step.mesh):
            continue
        sizes = [len(local) for local in by_rank.values()]
        padding = torch.cat(list(by_rank.values()))[spec.shape[0]:]
        assert sum(sizes) > spec.shape[0] and not padding.any()
        padded += 1
    assert padded >= 3 * 4  # embedding, w1, w3 and head, each with two moments


@dataclass(frozen=True)
class Inverse:
    """An optimizer whose update of zeros is not finite, or not zero."""

    power: int = -1
    moments: tuple[Moment, ...] = (Moment("average"),)

    def scalars(self, lr, step):
        return (lr,)

    def update(self, parameter, gradient, moments, scalars):
        average = 0.9 * moments[0] + gradient.abs() ** self.power  # 1 / 0, or 1
        return parameter - scalars[0] * gradient * average, (average,)


@pytest.mark.parametrize("power", [-1, 0])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_an_optimizer_of_the_users_leaves_padding_zero(mesh, power):
    optim = {"name": "custom", "_target_": "test_optimize.Inverse", "arguments": {"power": power}}
    data = points()
    alone, cut = (compile_lockstep(perceptron(), squared_error, data[0], m, optim) for m in ({}, mesh))
    for ours, wanted in zip(train_step(cut, data), train_step(alone, data), strict=True):
        assert_same(ours, wanted, 1e-10)
    padded = [(spec, by_rank) for spec, by_rank in cut.tensors().values() if spec.padded(cut.mesh)]
    assert len(padded) >= 4
    for spec, by_rank in padded:
        stored = torch.stack(list(by_rank.values()))
        assert stored.isfinite().all() and (stored == 0).any(), spec


def test_accumulated_gradients_are_cleared():
    data = batches(rows=6)
    step = compile_lockstep(llama(), llama_loss, data[0], {"dp_shard": 2}, microbatches=2)
    train_step(step, data[:1] * len(LRS))
    totals = [local for name, s in step.state.items() if name.startswith("gradient.") for local in s.local.values()]
    assert totals and not any(total.any() for total in totals)


def test_state_is_updated_in_place():
    data = batches()
    step = compile_lockstep(llama(), llama_loss, data[0], {"dp_shard": 2}, ADAMW)
    before = {name: local for name, (_, by_rank) in step.tensors().items() for local in by_rank.values()}
    where = {name: local.data_ptr() for name, local in before.items()}
    train_step(step, data)
    after = {name: local for name, (_, by_rank) in step.tensors().items() for local in by_rank.values()}
    assert {name: local.data_ptr() for name, local in after.items()} == where
    assert after["optim.step"] == len(LRS)


# ---- updates, one parameter ------------------------------------------------------------------------


@pytest.mark.parametrize(("ours", "make"), [
    (AdamW((0.8, 0.9), 1e-6, 0.1), lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)),
    (SGD(), torch.optim.SGD),
    (SGD(0.9, 0.1), lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1)),
], ids=["adamw", "sgd", "momentum"])
def test_an_update_is_that_of_pytorch(ours, make):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(6, generator=generator, dtype=torch.float64)
    theirs = nn.Parameter(p.clone())
    optimizer, moments = make([theirs]), tuple(torch.zeros_like(p) for _ in ours.moments)
    for step in range(1, 5):
        theirs.grad = torch.randn(6, generator=generator, dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = rate = 0.1 * step
        p, moments = ours.update(p, theirs.grad, moments, ours.scalars(torch.tensor(rate), torch.tensor(float(step))))
        optimizer.step()
    torch.testing.assert_close(p, theirs.detach(), atol=1e-7, rtol=1e-7)


def test_bf16_parameters_are_updated_in_fp32():
    model, x = nn.Linear(1, 1, bias=False).bfloat16(), torch.ones(1, 1, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    options = {"name": "sgd", "weight_decay": 2**-9, "max_norm": None}
    step = compile_lockstep(model, lambda m, b: m(b["x"]).sum(), {"x": x}, {}, options)
    step({"x": x}, lr=1.0)
    assert step.state_dict()["weight"].item() == -(2**-9)  # 1 - (1 + 2^-9); in bf16 the sum is 1



@pytest.mark.parametrize(("dtype", "wanted"), [("float32", 18.0), (None, 8.0)], ids=str)
def test_gradients_of_many_microbatches_are_added_up_in_float32(dtype, wanted):
    """Add gradients of 9. In bfloat16, neighbours of 4,096 are 32 apart, so adding 9 would change nothing."""
    model = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    batch = {"x": torch.full((1024, 4), 9.0, dtype=torch.bfloat16)}
    options = {"microbatches": 1024, "ranks": "lockstep", "passes": {"accumulate": {"dtype": dtype}}}
    step = compile_step(model, lambda model, batch: model(batch["x"]).mean(), batch, optim={"name": "sgd"}, **options)
    assert step(batch)["grad_norm"] == pytest.approx(wanted, rel=1e-6)


def test_what_all_updates_share_is_computed_once_and_nothing_is_cast_to_its_own_dtype():
    programs = {}
    data = batches(rows=6)
    compile_lockstep(llama().float(), llama_loss, data[0], {"dp_shard": 2}, ADAMW,
                     observe=lambda program, record: programs.update({record.name: program}))
    updates = [n for n in programs["optimize"].calls() if ir.phase(n) == "optimizer"]
    casts = [n for n in updates if op_name(n.target) in ("to.dtype", "_to_copy")]
    assert sum(op_name(n.target) == "pow.Scalar" for n in updates) == 2  # bias corrections
    assert len(casts) == 2  # from the rate and the step number
    named = {ir.parameter(n) for n in updates}
    assert named == {"", *(i.name for i in programs["optimize"].inputs if i.kind == "parameter")}


class WithIdle(nn.Module):
    """A model with two layers, a head that nothing reads, and a table that is read without a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        self.idle, self.read = nn.Parameter(torch.ones(3).double()), nn.Parameter(torch.ones(4).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.read.detach())


@pytest.mark.parametrize(("mesh", "microbatches"), [({}, 1), ({"dp_shard": 2}, 1), ({"dp_shard": 2}, 2), ({"pp": 2}, 2)], ids=str)
def test_a_parameter_without_a_gradient_stays_as_it_is(mesh, microbatches):
    """Compare with eager PyTorch: after 100 steps, a decay of 0.001 a step would leave 0.905 of it."""
    model = WithIdle()
    batch = {"x": torch.randn(4, 4, dtype=torch.float64)}
    optim = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
    options = {"microbatches": microbatches, "passes": {"verify": "spec" if "pp" in mesh else "numeric"}}
    step = compile_lockstep(model, lambda model, batch: model(batch["x"]).square().mean(), batch, mesh, optim, evaluate=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(100):
        step(batch)
        optimizer.zero_grad()
        model(batch["x"]).square().mean().backward()
        optimizer.step()
    assert_same(step.state_dict(), dict(model.named_parameters()), 1e-10)
    assert step.state_dict()["idle"].tolist() == [1.0] * 3 and not [name for name in step.state if "idle" in name and "optim" in name]
    assert step.report["remarks"] == ["parameters on which the loss does not depend stay unchanged: idle, read"]
