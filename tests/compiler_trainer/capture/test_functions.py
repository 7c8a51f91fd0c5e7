"""Custom autograd functions, detached regions, mutated buffers and dropout give the same results on every mesh."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, compile_lockstep, perceptron, points, squared_error, train_plainly, trained_alike
from sweeps import quick
from torch import nn

from compiler_trainer import UserError
from compiler_trainer.capture.capture import capture
from passes.ir import ir
from passes.ir.printer import print_program
from passes.trace.functions import function_of

MESHES = ({}, {"dp_replicate": 2}, {"dp_shard": 3}, {"tp": 2}, {"dp_replicate": 2, "tp": 2})
PLAIN = {"name": "sgd"}


class StraightThrough(torch.autograd.Function):
    """Rounds in the forward; its backward is scaled so that it differs from the derivative."""

    @staticmethod
    def forward(ctx, x, w, scale):
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return torch.mm((x * 4).round() / 4, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T * ctx.scale, x.T @ g, None


class Rounding(nn.Module):
    """An embedding, a straight-through product with a transposed weight, a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out, self.head = nn.Embedding(31, 12), nn.Linear(17, 12), nn.Linear(12, 31)
        self.weight = nn.Parameter(torch.randn(17, 12) / 3)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = StraightThrough.apply(x.flatten(0, 1), self.weight.t().contiguous(), 0.7).view(*tokens.shape, 17)
        return self.head(x + self.out(F.gelu(y)))


class Statistics(nn.Module):
    """BatchNorm, a counter, a no_grad region and a detached factor."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.shape[0]
        with torch.no_grad():
            scale = self.inner.weight.square().sum()
        hidden = self.norm(self.inner(x))
        return self.outer(hidden) * scale + (hidden.detach() * hidden).sum(-1, keepdim=True)


class Dropping(nn.Module):
    """Dropout on batch-sharded, feature-sharded and residual values."""

    def __init__(self):
        super().__init__()
        self.embedding, self.wide, self.narrow, self.head = nn.Embedding(31, 12), nn.Linear(12, 17), nn.Linear(17, 12), nn.Linear(12, 31)
        self.drop = nn.Dropout(0.3)

    def forward(self, tokens):
        x = self.drop(self.embedding(tokens))
        return self.head(x + self.drop(self.narrow(self.drop(F.gelu(self.wide(x))))))


def token_loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def square_loss(model, batch):
    return model(batch["x"]).square().mean() / 100


def token_batches() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{k: torch.randint(0, 31, (5, 7), generator=generator) for k in ("tokens", "labels")} for _ in range(3)]


def float_batches() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(7, 12, generator=generator, dtype=torch.float64)} for _ in range(3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("module", "loss_fn", "data"), [(Rounding, token_loss, token_batches()),
                                                         (Statistics, square_loss, float_batches())], ids=["function", "buffers"])
@pytest.mark.sample(2)
def test_trains_like_one_device(mesh, module, loss_fn, data) -> None:
    torch.manual_seed(0)
    model = module().double()
    metrics, final = train_plainly(model, loss_fn, data, PLAIN)
    step = compile_lockstep(model, loss_fn, data[0], mesh, PLAIN)
    for batch, lr, expected in zip(data, (1e-2, 3e-2, 2e-2), metrics):
        assert step(batch, lr)["loss"] == pytest.approx(expected["loss"], abs=1e-10)
    for name, value in step.state_dict().items():
        assert (value - final[name]).abs().max() < 1e-10, name


def test_running_statistics_are_used_in_evaluation() -> None:
    torch.manual_seed(0)
    model, data = Statistics().double(), float_batches()
    step = compile_lockstep(model, square_loss, data[0], {"dp_shard": 2}, PLAIN, evaluate=True)
    before = step.evaluate(data[0])
    assert before == pytest.approx(square_loss(model.eval(), data[0]).item(), abs=1e-12)
    step(data[0], 0.0)
    assert step.evaluate(data[0]) != before


def dropped(mesh, **options) -> list[float]:
    torch.manual_seed(0)
    data = token_batches()
    step = compile_lockstep(Dropping().double(), token_loss, data[0], mesh, PLAIN, **options)
    return [step(batch, 1e-2)["loss"] for batch in data]


@pytest.mark.parametrize("mesh", quick(MESHES[1:], 3), ids=str)
def test_dropout_is_the_same_on_every_mesh(mesh) -> None:
    assert dropped(mesh) == pytest.approx(dropped({}), abs=1e-12)


def test_dropout_differs_by_seed_and_step_and_drops_its_share() -> None:
    assert dropped({}) != dropped({}, seed=1)

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return F.dropout(x * self.weight, 0.25, self.training)

    batch = {"x": torch.ones(200, 100, dtype=torch.float64)}
    step = compile_lockstep(Ones().double(), lambda m, b: m(b["x"]).mean(), batch, {}, PLAIN, evaluate=True)
    losses = [step(batch, 0.0)["loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    assert losses == pytest.approx([1.0] * 3, abs=0.02)  # 20,000 draws: four standard deviations are 0.016
    assert step.evaluate(batch) == 1.0


class Transposed(nn.Module):
    """One parameter used transposed: plainly, through contiguous(), through a function, or in all three ways."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(8, 12) / 3)

    def forward(self, x):
        w = self.weight
        uses = {"plain": lambda: x @ w.t(), "contiguous": lambda: x @ w.t().contiguous(),
                "function": lambda: StraightThrough.apply(x, w.t().contiguous(), 0.7)}
        return uses[self.how]() if self.how in uses else uses["plain"]() + uses["contiguous"]() + (x[:, :8] @ w)[:, :8]


@pytest.mark.parametrize("how", ["plain", "contiguous", "function", "three uses"])
@pytest.mark.sample(2)
def test_a_replicated_gradient_is_reduced_once_and_never_while_accumulating(how: str) -> None:
    torch.manual_seed(0)
    model, data = Transposed(how).double(), [{"x": b["x"][:6]} for b in float_batches()]
    _, final = train_plainly(model, square_loss, data, PLAIN, microbatches=2)
    step = compile_lockstep(model, square_loss, data[0], {"dp_replicate": 2}, PLAIN, microbatches=2)
    for batch, lr in zip(data, (1e-2, 3e-2, 2e-2)):
        step(batch, lr)
    assert (step.state_dict()["weight"] - final["weight"]).abs().max() < 1e-12
    reductions = {name: Counter(ir.example(n.args[0]).numel() for n in compiled.program.calls() if "all_reduce" in str(n.target))
                  for name, compiled in step.train.items()}
    assert reductions == {"accumulate": {1: 1}, "apply": {8 * 12: 1}}  # the loss; the gradient


def test_gradients_of_a_custom_function_are_held_to_its_authors() -> None:
    model, data = Rounding().double(), token_batches()
    step = compile_lockstep(model, token_loss, data[0], {"tp": 2}, PLAIN, passes={"verify": "numeric"})
    compared = next(record["errors"] for record in step.report["passes"] if record["name"] == "joint")
    assert {f"gradient {name}" for name, _ in model.named_parameters()} <= compared.keys()


class Leaky(torch.autograd.Function):
    """A function that stores a slope as a tensor, and differentiates by PyTorch's own functions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, x * torch.tensor(0.1, dtype=x.dtype))

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = torch.where(x > 0, x, 0.1 * x)
        return torch.autograd.grad(y, x, g)[0]


class Scaled(torch.autograd.Function):
    """A function that stores seven numbers as a tensor."""

    by = torch.arange(7, dtype=torch.float64)

    @staticmethod
    def forward(ctx, x):
        return x * Scaled.by

    @staticmethod
    def backward(ctx, g):
        return g * Scaled.by


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@pytest.mark.parametrize("mesh", ({}, {"dp_shard": 2}))
def test_a_function_may_hold_a_number(mesh) -> None:
    trained_alike(perceptron(Calling(Leaky)), squared_error, points(), mesh, NO_DECAY)


def test_a_function_that_holds_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"Scaled uses a tensor \(torch.float64 \[7\]\) that is not an argument; make it an argument"):
        compile_lockstep(perceptron(Calling(Scaled)), squared_error, points()[0], {"dp_shard": 2})


class Multiple(torch.autograd.Function):
    """A multiple by a constant, and ten times it in the backward."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, g):
        return g * ctx.by * 10, None


class Multiplying(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.inner, self.by = nn.Linear(4, 4), by

    def forward(self, x):
        return Multiple.apply(self.inner(x), self.by)


def test_two_captures_in_one_process_do_not_see_each_other():
    """Both have a first function of the same name; each keeps its own, and is printed without a number."""
    batch, x = {"x": torch.randn(2, 4)}, torch.randn(2, 4)
    captured = [capture(Multiplying(by), lambda m, b: m(b["x"]).sum(), batch, torch.device("cpu"))[0] for by in (2.0, 3.0)]
    calls = [next(node for node in program.calls() if function_of(node)) for program in captured]
    for by, call in zip((2.0, 3.0), calls):
        assert torch.equal(call.target(x), x * by) and torch.equal(function_of(call).forward(x)[0], x * by)
        assert torch.equal(function_of(call).backward(x, x * by, x)[0], x * by * 10)
    first, second = map(print_program, captured)
    assert first == second and "= fn.Multiple_0(" in first
