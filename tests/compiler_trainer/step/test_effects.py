"""The effect of each option: its line, counted by hand, and the refusal of an option without one."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_DECAY, batches, compile_lockstep, llama, llama_loss
from torch import Tensor, nn

from compiler_trainer.config.errors import UserError
from compiler_trainer.step.effects import NEEDS, effect_lines
from compiler_trainer.step.meeting import ROUND

WIDTH, ROWS = 16, 4
MATRIX, ACTIVATIONS = WIDTH * WIDTH * 4, ROWS * WIDTH * 4  # bytes, in fp32


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin())


class Stack(nn.Module):
    """Layers of two matmuls with a sine in between, four operators each."""

    def __init__(self, count: int = 3, width: int = WIDTH, layer: type[nn.Module] = Layer):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tanh(Layer):
    """A layer whose backward reads only its result and its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh()


class Attends(Layer):
    """A layer of attention written with a softmax that no rewrite knows: its weights are used twice."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.up(x) @ x.mT).softmax(-1)
        return weights @ self.down(x) + weights.sum(-1, keepdim=True)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["x"])


def lines(model=None, mesh=None, loss=loss_of, batch=None, microbatches=1, **passes) -> dict[str, str]:
    """Return the line of each option of a step."""
    model = Stack() if model is None else model
    width = next(model.parameters()).shape[-1]
    batch = {"x": torch.randn(ROWS * microbatches, width)} if batch is None else batch
    step = compile_lockstep(model, loss, batch, mesh or {}, NO_DECAY, microbatches=microbatches, passes=passes)
    return dict(line.split(": ", 1) for line in effect_lines(step.report))


def of_decoder(mesh=None, layers=2, **passes) -> dict[str, str]:
    return lines(llama(layers), mesh, llama_loss, batches()[0], **passes)


@pytest.mark.parametrize("count", [3, 12])
def test_recomputation_counts_operators_and_bytes_of_all_layers(count):
    """Check that `up` and the sine are computed again, and not kept; layers that another stands for count, too."""
    found = lines(Stack(count), remat={"policy": "full"})
    kept, less = 3 * count * ACTIVATIONS + 4, 2 * count * ACTIVATIONS  # the loss keeps its difference and a number
    assert f"; {less:,} of {kept:,} bytes of activations less" in found["passes.remat.policy"]
    assert found["passes.remat.policy"].startswith(f"{2 * count} of {4 * count + 4} operators recomputed")
    assert ("passes.fold_layers" in found) == (count == 12)


def test_offloading_counts_bytes():
    found = lines(remat={"policy": "offload"})
    assert found["passes.remat.policy"] == f"{8 * ACTIVATIONS:,} of {9 * ACTIVATIONS + 4:,} bytes of activations kept in host memory"


def test_values_that_options_name_are_counted():
    found = lines(remat={"policy": "none", "ops": {"sin": "recompute"}, "modules": {"layers.0": "save"}})
    assert found["passes.remat.ops"].startswith("2 of 2 operators")  # `modules` decides on the third
    assert found["passes.remat.policy"].startswith(f"2 of 16 operators recomputed (without views); {2 * ACTIVATIONS} of")
    assert found["passes.remat.modules"].startswith("6 of 6 operators")  # with two views of weights


def test_gathers_are_repeated_or_kept():
    found = lines(mesh={"dp_shard": 2})
    assert found["passes.remat.regather"] == "5 of 6 gathers of parameters repeated in the backward"  # not the first `up`
    once = lines(mesh={"dp_shard": 2}, microbatches=2, accumulate={"reduce": "step", "gather": "step"})
    assert once["passes.accumulate.gather"] == "6 gathers of parameters once a step"
    assert once["passes.accumulate.reduce"] == "6 of 6 gradients reduced once a step"


def test_float8_counts_linear_layers():
    found = lines(Stack(12), cast={"float8": "tensorwise"})
    assert found["passes.cast.float8"] == "23 of 24 linear layers in float8; 1 not: the head"


def test_casts_count_matmuls_and_operators():
    batch = {"x": torch.randn(ROWS, WIDTH).bfloat16()}
    cast = {"modules": {"layers.0": "float32"}, "ops": {"sin": "float32"}}
    found = lines(Stack().bfloat16(), batch=batch, cast=cast)
    assert found["passes.cast.param_dtype"] == "4 of 6 matmuls in bf16"
    assert found["passes.cast.modules"] == "4 operators cast"
    assert found["passes.cast.ops"] == "2 operators cast"  # `modules` decides on the third


def test_loss_in_chunks_says_the_largest_logits():
    tokens, vocabulary = batches()[0]["labels"].numel(), llama().output.weight.shape[0]
    sizes = [rows * vocabulary * 8 for rows in (tokens, -(-tokens // 5))]
    whole, chunked = of_decoder(), of_decoder(chunk_loss={"chunks": 5})
    end = "losses in chunks; the largest logits of a rank have {:,} bytes".format
    assert whole["passes.chunk_loss.logits_mib"] == f"0 of 1 {end(sizes[0])}"
    assert chunked["passes.chunk_loss.chunks"] == f"1 of 1 {end(sizes[1])}"


def test_context_parallelism_counts_attention():
    found = of_decoder({"cp": 2}, context={"method": "ring"})
    assert found["mesh.cp"] == "2 of 2 attentions over the sharded sequence; ring 2"
    assert found["passes.context.method"] == "2 of 2 attentions by this method"
    assert found["passes.context.load_balance"].startswith("2 pieces of the sequence on each rank; head_tail")
    written = lines(Stack(layer=Attends), {"cp": 2}, batch={"x": torch.randn(2, 8, WIDTH)})
    assert written["mesh.cp"] == (
        "0 of 3 attentions over the sharded sequence; by a softmax of the model, which reads all keys 3"
    )


def test_merged_and_hidden_collectives_are_counted():
    """Count by hand, with one layer and no buckets.

    Sent are `up`, `down`, `down` again for the backward, and both gradients. No matmul runs during `up` and its gradient.
    """
    options = {"bucket_mib": 0, "prefetch": 1}
    alone, at_once = (lines(Stack(1), {"dp_shard": 2}, communication=options | {"prefetch": n}) for n in (1, 0))
    total = 5 * MATRIX // 2 + 2 * 4  # and two numbers: the loss and the norm
    assert alone["passes.communication.prefetch"] == f"{3 * MATRIX // 2:,} of {total:,} bytes sent during matmuls"
    assert at_once["passes.communication.prefetch"] == f"0 of {total:,} bytes sent during matmuls"
    # of a layer, both weights are gathered as one, and both gradients are reduced as one; the backward gathers `down`
    merged = lines(Stack(1), {"dp_shard": 2})
    assert merged["passes.communication.bucket_mib"] == "2 of 7 collectives fewer by merging"
    assert alone["passes.communication.bucket_mib"] == "0 of 7 collectives fewer by merging"


def test_rings_and_turns_are_counted():
    """Count `wq`, `wo`, `w1`, `w3`, `w2` of both layers and the head, forward and backward; one key head is not split.

    Of turns, count a sum over two ranks of 4 rows for each layer, and for the gradient of each input but the first; the last sum is alone.
    """
    found = of_decoder({"tp": 2}, communication={"async_tp": "all"})
    assert found["passes.communication.async_tp"] == f"{2 * (2 * 5 + 1)} of 22 matmuls in rings"
    turns = lines(mesh={"tp": 2}, microbatches=2, communication={"batch_overlap": 2})["passes.communication.batch_overlap"]
    sums = 2 * (3 + 2)
    assert turns == f"{(sums - 1) * ACTIVATIONS:,} of {sums * ACTIVATIONS:,} bytes sent while another microbatch is computed"


def test_stages_are_counted():
    found = lines(Stack(4), {"pp": 2}, microbatches=2)
    assert found["passes.pipeline.stages"] == "2 stages; stage 0: 2 of 4 layers; stage 1: 2 of 4 layers"


def test_small_parameters_are_counted():
    found = of_decoder({"dp_shard": 2}, shard={"min_shard_elements": 25})
    assert found["passes.shard.min_shard_elements"] == "5 of 21 parameters are whole on each rank"  # the norms


def test_wider_sums_of_gradients_are_counted():
    batch = {"x": torch.randn(2 * ROWS, WIDTH).bfloat16()}
    found = lines(Stack().bfloat16(), batch=batch, microbatches=2)
    assert found["passes.accumulate.dtype"] == "6 of 6 gradients added up in a wider dtype"


def test_parameters_of_a_plan_are_counted():
    found = lines(mesh={"tp": 2}, shard={"plan": {"*.up.weight": {"tp": 0}}})
    assert found["passes.shard.plan"] == "3 of 6 parameters placed as it says"


# ---- options without an effect ------------------------------------------------------------------------

CP, TP, DP = {"cp": 2}, {"tp": 2}, {"dp_shard": 2}
REFUSED = {
    "passes.cast.float8": (Stack(width=18), {}, "tensorwise", "nothing can compute in float8: 18 x 18 are not multiples of 16"),
    "passes.chunk_loss.chunks": (Stack(), {}, 2, r"are not chunked: %linear_5 is followed by %add_2"),
    "passes.chunk_loss.logits_mib": (Stack(), {}, 1e-5, r"are not chunked: %linear_5 is followed by %add_2 .*; set it to 1"),
    "passes.remat.policy": (Stack(layer=Tanh), {}, "full", "the backward reads no value of a layer"),
    "passes.remat.save": (Stack(), {}, ("lineer",), "no layer with policy=selective has operators called lineer"),
    "passes.remat.ops": (Stack(), {}, {"add": "recompute"}, "treated otherwise: leaves its region"),
    "passes.remat.modules": (Stack(layer=Tanh), {}, {"layers.2": "recompute"}, "treated otherwise: "),
    "passes.context.method": (Stack(), CP, "ring", "no attention runs over mesh.cp; set it to auto"),
    "passes.moe.dispatch": (Stack(), {}, "dropless", "no operator of the model sorts rows by expert"),
    "passes.moe.chunks": (Stack(), {}, 2, "no operator of the model sorts rows by expert"),
    "passes.communication.bucket_mib": (Stack(), DP, 1e-4, "no two collectives fit in a bucket of this size"),
    "passes.communication.async_tp": (Stack(), TP, "all", "no matmul stands before or after a collective over mesh.tp"),
    "passes.communication.batch_overlap": (Stack(), DP, 2, "microbatches send nothing; set it to 1"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_without_effect_is_refused(option):
    model, mesh, value, reason = REFUSED[option]
    _, group, name = option.split(".")
    microbatches = 2 if name == "batch_overlap" else 1
    with pytest.raises(UserError, match=rf"^{option}: {re.escape(str(value))} has no effect: .*{reason}"):
        lines(copy.deepcopy(model), mesh, microbatches=microbatches, **{group: {name: value}})


def test_an_option_without_effect_on_the_mesh_that_is_left_is_not_refused(monkeypatch):
    """A job of run.elastic=true would end because a rank was lost: two collectives no longer fit in a bucket."""
    monkeypatch.setenv(ROUND, "1")
    found = lines(Stack(), DP, communication={"bucket_mib": 1e-4})
    assert found["passes.communication.bucket_mib"].startswith("0 of ")


def test_defaults_may_have_no_effect():
    assert lines(Stack(layer=Tanh))["passes.remat.policy"].startswith("0 of ")


@pytest.mark.parametrize(("option", "other"), [(option, other) for option, other, _ in NEEDS])
def test_an_option_that_another_turns_off_is_refused(option, other):
    """Check each option with a value that is not its default, and the other with one of another kind."""
    values = {"float8_skip": ["layers.0"], "float8_head": True, "logits_mib": 1.0, "headroom": 0.1}
    of_other = {"passes.context.load_balance": "none", "passes.chunk_loss.chunks": 2}
    (_, group, name), (_, _, switch) = option.split("."), other.split(".")
    options = {name: values.get(name, 3)} | ({switch: of_other[other]} if other in of_other else {})
    group_of_other = other.split(".")[1]
    assert group == group_of_other
    with pytest.raises(UserError, match=f"^{option}: .* has no effect with {other}=.*; set {other} to"):
        lines(**{group: options})
