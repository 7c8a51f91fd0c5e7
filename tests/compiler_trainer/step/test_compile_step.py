"""Compiled steps equal eager PyTorch: losses, gradient norms and parameters, on any mesh."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from oracle import (
    EXACT,
    NO_DECAY,
    assert_same,
    batches,
    compile_lockstep,
    llama,
    llama_loss,
    perceptron,
    points,
    squared_error,
    train_plainly,
    train_step,
    trained_alike,
)
from sweeps import quick
from torch import Tensor, nn

from compiler_trainer import UserError, compile_step

FSDP, HSDP = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}


# ---- a Llama ---------------------------------------------------------------------------------------


MESHES: list = [{}, FSDP, {"dp_shard": 3}, {"dp_shard": 4}, {"dp_replicate": 2}, HSDP]


@pytest.mark.parametrize("mesh", quick(MESHES, 0, 2, 5), ids=str)
@pytest.mark.sample(2)
def test_steps_are_those_of_eager_pytorch_on_any_mesh(mesh):
    trained_alike(llama(), llama_loss, batches(), mesh)


@pytest.mark.parametrize("passes", quick([{"remat": {"policy": "full"}}, {"remat": {"regather": False}},
                                          {"communication": {"bucket_mib": 0}}, {"shard": {"min_shard_elements": 500}}], 0, 3), ids=str)
def test_passes_change_no_value(passes):
    trained_alike(llama(n_layers=2), llama_loss, batches(), FSDP, passes=passes)


@pytest.mark.parametrize("optim", [
    {"name": "adamw", "max_norm": None},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1, "max_norm": 0.2},
], ids=str)
@pytest.mark.sample(2)
def test_optimizers_are_pytorchs(optim):
    trained_alike(llama(), llama_loss, batches(), FSDP, optim)


@pytest.mark.parametrize("mesh", [{}, HSDP], ids=str)
def test_microbatches_are_averaged_by_their_labels(mesh):
    trained_alike(llama(), llama_loss, batches(rows=6), mesh, microbatches=2)


def test_tied_weights_are_one_parameter():
    trained_alike(llama(tied=True), llama_loss, batches(), FSDP)


def test_bf16_compute_over_fp32_masters_stays_close():
    model, data = llama(dtype=torch.float32), batches()
    step = compile_lockstep(model, llama_loss, data[0], FSDP, passes={"cast": {"param_dtype": "bfloat16"}})
    expected, state = train_plainly(model, llama_loss, data)
    losses = [m["loss"] for m in train_step(step, data)]
    assert losses == pytest.approx([m["loss"] for m in expected], rel=2e-2)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in step.state_dict().values())
    assert step.state_dict().keys() == state.keys()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_evaluation_is_the_loss_and_changes_nothing(microbatches):
    model, (batch, _, _) = llama(), batches(rows=6)
    step = compile_lockstep(model, llama_loss, batch, FSDP, microbatches=microbatches, evaluate=True)
    expected = llama_loss(model, batch).item()
    assert step.evaluate(batch) == pytest.approx(expected, rel=EXACT)
    assert_same(step.state_dict(), model.state_dict(), 0)
    assert step(batch)["loss"] == pytest.approx(expected, rel=EXACT)


def test_initial_values_take_the_place_of_the_models():
    model, (batch, _, _) = llama(), batches()
    initial = {name: p.detach() for name, p in model.named_parameters()}
    step = compile_lockstep(copy.deepcopy(model).to("meta"), llama_loss, batch, FSDP, initial=initial.items())
    assert_same(step.state_dict(), model.state_dict(), 0)


def test_the_model_and_its_initial_values_are_left_alone():
    model, data = llama(), batches()
    before = copy.deepcopy(model.state_dict())
    train_step(compile_lockstep(model, llama_loss, data[0], {}), data)
    assert_same(model.state_dict(), before, 0)


# ---- third-party modules ----------------------------------------------------------------------------


class Centered(nn.Module):
    """Subtracts the batch mean in training and keeps a running mean, like batch normalization."""

    def __init__(self, dim: int):
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        self.mean.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return x - mean + self.mean


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 4}, HSDP], ids=str)
@pytest.mark.sample(2)
def test_biases_single_entries_unused_and_frozen_parameters(mesh):
    trained_alike(perceptron(), squared_error, points(), mesh, NO_DECAY)


@pytest.mark.parametrize("mesh", [{}, FSDP, {"dp_shard": 3}], ids=str)
@pytest.mark.sample(2)
def test_buffers_that_the_forward_changes_are_state(mesh):
    trained_alike(perceptron(Centered(7)), squared_error, points(), mesh, NO_DECAY)


def test_each_microbatch_changes_the_buffers():
    trained_alike(perceptron(Centered(7)), squared_error, points(6), FSDP, NO_DECAY, microbatches=2)


def test_evaluation_leaves_buffers_alone():
    model, (batch, _, _) = perceptron(Centered(7)), points()
    step = compile_lockstep(model, squared_error, batch, FSDP, evaluate=True)
    assert math.isfinite(step.evaluate(batch))
    assert_same(step.state_dict(), model.state_dict(), 0)


@pytest.mark.parametrize("mesh", [{}, FSDP, {"dp_shard": 3}], ids=str)
@pytest.mark.sample(2)
def test_batch_normalisation_is_that_of_the_whole_batch(mesh):
    trained_alike(perceptron(nn.BatchNorm1d(7)), squared_error, points(), mesh, NO_DECAY)


# ---- refusals ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_step():
    return compile_lockstep(perceptron(), squared_error, points()[0], FSDP, NO_DECAY, evaluate=True)


@pytest.mark.parametrize(("change", "says"), [
    (lambda b: {"x": b["x"]}, r"batch\['y'\]: is missing"),
    (lambda b: b | {"z": b["x"]}, r"batch\['z'\]: is not among the compiled entries x, y"),
    (lambda b: b | {"x": b["x"][:4]}, r"batch\['x'\]: is torch.float64\[4, 5\], .* torch.float64\[5, 5\]"),
    (lambda b: b | {"y": b["y"].float()}, r"batch\['y'\]: is torch.float32\[5, 3\], .* torch.float64\[5, 3\]"),
    (lambda b: {}, r"batch\['x'\]: is missing"),
])
def test_a_batch_other_than_the_compiled_one_is_refused(small_step, change, says):
    before = small_step.state_dict()
    with pytest.raises(UserError, match=says):
        small_step(change(points()[0]))
    with pytest.raises(UserError, match=says):
        small_step.evaluate(change(points()[0]))
    assert_same(small_step.state_dict(), before, 0)


def test_weights_without_values_are_refused():
    with pytest.raises(UserError, match=r"scale: has no initial value; give real weights or `initial`"):
        compile_lockstep(perceptron().to("meta"), squared_error, points()[0], FSDP)


def test_an_initial_value_of_another_shape_is_refused():
    initial = [("up.weight", torch.zeros(3, 5))]
    with pytest.raises(UserError, match=r"up.weight: initial value has shape \(3, 5\), the model has \(7, 5\)"):
        compile_lockstep(perceptron(), squared_error, points()[0], FSDP, initial=initial)


def test_a_model_of_which_nothing_is_trained_is_refused_and_can_be_evaluated():
    model, batch = perceptron().requires_grad_(False), points()[0]
    with pytest.raises(UserError, match="^model: none of its parameters that the loss uses requires a gradient: nothing to train$"):
        compile_lockstep(model, squared_error, batch, FSDP)
    step = compile_lockstep(model, squared_error, batch, FSDP, train=False, evaluate=True)
    assert step.evaluate(batch) == pytest.approx(squared_error(model, batch).item(), abs=EXACT)


@pytest.mark.parametrize("loss", [
    lambda model, batch: batch["x"].sum(),
    lambda model, batch: batch["x"].sum() + (model.up.weight > 0).sum(),
], ids=["without the model", "of a comparison"])  # fmt: skip
def test_a_loss_without_a_gradient_is_refused(loss):
    with pytest.raises(UserError, match="^model: the loss depends on none of its parameters: nothing to train$"):
        compile_lockstep(perceptron(), loss, points()[0], FSDP)


def test_entries_of_other_rows_than_samples_have_no_microbatches():
    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return squared_error(model, batch) * batch["factors"].prod()

    data = [batch | {"factors": torch.tensor([2.0, 3.0]).double()} for batch in points(4)]
    trained_alike(perceptron(), loss_fn, data, {}, NO_DECAY)
    with pytest.raises(UserError, match=r"batch\['factors'\]: has 2 rows and batch\['x'\] 4; .*make it a buffer"):
        compile_lockstep(perceptron(), loss_fn, data[0], {}, microbatches=2)


@pytest.mark.parametrize(("options", "says"), [
    ({"lower": {"backend": "inductor"}}, "lower.backend: is 'inductor', but lockstep ranks are interpreted"),
    ({"mesh": {"dp": 2}}, "mesh.dp: no such axis"),
    ({"mesh": {"dp_shard": 0}}, "mesh.dp_shard: size is 0"),
    ({"microbatches": 2}, r"microbatches: 2 does not divide the 5 rows of batch\['x'\]"),
    ({"microbatches": 0}, "microbatches: is 0; must be at least 1"),
    ({"optim": {"name": "adagrad"}}, "optim.name"),
    ({"optim": {"momentun": 0.9}}, "optim.momentun.*momentum"),
    ({"passes": {"remat": {"policy": "ful"}}}, "passes.remat.policy.*full"),
    ({"passes": {"shard": {"plan": {"nothing.*": {"tp": 0}}}}}, "nothing"),
    ({"ranks": "lockstop"}, "ranks: is 'lockstop'"),
    ({"mesh": FSDP, "ranks": "processes"}, "mesh: .* is for 2 ranks, but 1 are running"),
], ids=lambda value: str(value)[:40])
def test_options_that_cannot_hold_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        compile_step(perceptron(), squared_error, points()[0], **{"ranks": "lockstep", **options})
