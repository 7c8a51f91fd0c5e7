"""Metrics, buffers and samples that no trained activation decides are in every pipeline, and other edges of a step."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, compile_lockstep, points, squared_error, trained_alike
from torch import nn

from compiler_trainer import UserError
from compiler_trainer.step.program_cache import ProgramCache
from passes.lower.store import Store


class Watching(nn.Module):
    """Two layers, with buffers of a weight, of the batch, of each other, and a count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6, 5))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("before", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.a.weight, 0.5)
            self.before.copy_(self.last)
            self.last.copy_(x.mean())
            self.count.add_(1)
        return self.b(torch.tanh(self.a(x)))


def test_buffers_of_weights_and_batches_are_stored_in_stages():
    trained_alike(Watching().double(), squared_error, points(6), {"pp": 2}, NO_DECAY, microbatches=2)


def test_a_buffer_of_a_sharded_weight_is_stored_in_the_stage_that_changes_it():
    trained_alike(Watching().double(), squared_error, points(6), {"pp": 2, "dp_shard": 2}, NO_DECAY, microbatches=2)


def test_metrics_that_need_no_activation_are_returned_by_stages():
    def loss(model, batch):
        metrics = {"norm": model.a.weight.norm(), "mean": batch["x"].mean(), "one": torch.ones(()), "big": torch.tensor(5)}
        return F.mse_loss(model(batch["x"]), batch["y"]), metrics

    batch, results = points(6)[0], []
    for mesh in ({}, {"pp": 2}):
        step = compile_lockstep(Watching().double(), loss, batch, mesh, {"name": "sgd"}, microbatches=2)
        results.append(step(batch, 0.1))
    assert results[0].keys() == results[1].keys() >= {"norm", "mean", "one", "big"}
    assert all(results[1][name] == pytest.approx(value, abs=1e-12) for name, value in results[0].items())


class Linear(torch.autograd.Function):
    """The example of PyTorch's documentation, which saves None if there is no bias."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight, bias)
        y = x @ weight.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, None if bias is None else gradient.sum(0)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_function_may_save_none(has_bias):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(5, 3, bias=has_bias)

        def forward(self, x):
            return Linear.apply(x, self.linear.weight, self.linear.bias)

    trained_alike(Layer().double(), squared_error, points(6), {"dp_shard": 2}, NO_DECAY)


@torch.library.custom_op("outputs::exp", mutates_args=())
def _exp(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def _backward(ctx, gradient):
    (out,) = ctx.saved_tensors
    return gradient * (2 * out.conj().real - out).conj()


_exp.register_fake(lambda x: torch.empty_like(x))
_exp.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


def test_a_conjugate_is_not_taken_for_the_result_that_it_is_of():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(5, 6)

        def forward(self, x):
            y = torch.ops.outputs.exp(torch.view_as_complex(self.linear(x).view(-1, 3, 2)))
            return y.real + y.imag

    trained_alike(Complex().double(), squared_error, points(4), {}, NO_DECAY)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Widths(nn.Module):
    """A custom function on tensors of many widths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5 + k, 6 + k) for k in range(8))
        self.last = nn.Linear(13, 3)

    def forward(self, x):
        for layer in self.layers:
            x = Scale.apply(layer(x)).tanh()
        return self.last(x)


@pytest.mark.full
def test_a_model_with_many_functions_has_the_same_key_at_each_start(tmp_path):
    found = []
    for _ in range(3):
        gc.collect()
        step = compile_lockstep(Widths(), squared_error, points(6, torch.float32)[0], {}, cache=ProgramCache(None, Store(tmp_path)))
        found.append((step.report["program"]["read"], step.report["program"]["stored_as"]))
    assert [is_read for is_read, _ in found] == [False, True, True] and len({key for _, key in found}) == 1


def test_a_batch_of_fewer_samples_than_microbatches_is_refused():
    step = compile_lockstep(Watching(), squared_error, points(6, torch.float32)[0], {}, {"name": "sgd"}, microbatches=3)
    with pytest.raises(UserError, match=r"batch\['x'\]: has 2 samples, which are not 3 microbatches"):
        step(points(2, torch.float32)[0])


def test_a_loss_may_write_into_its_batch():
    def loss(model, batch):
        batch["x"].mul_(0.5)
        return squared_error(model, batch)

    batch = points(4)[0]
    expected = loss(Watching().double(), {name: value.clone() for name, value in batch.items()}).item()
    assert compile_lockstep(Watching().double(), loss, batch, {}, {"name": "sgd"})(batch, 0.1)["loss"] == pytest.approx(expected)
