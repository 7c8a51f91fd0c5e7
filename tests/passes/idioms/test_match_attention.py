"""Attention that models write out: which is matched, which is left, and whole transformers models on meshes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
import zoo
from attention_cases import F64, TOLERANCE, grids, random
from oracle import LRS, assert_same, compile_lockstep, train_plainly, train_step
from rule_harness import Function, capture, check
from sweeps import in_turn
from torch import Tensor

from compiler_trainer.capture.capture import capture as capture_model
from passes.idioms.intervals import Intervals
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ops.attend import interval_attention

LOW = torch.finfo(F64).min
SIZE = 12

def causal() -> Tensor:
    i, j = grids(SIZE)
    return i >= j


def reading(attention, *tensors: Tensor) -> tuple[Function, ir.Report]:
    """Return the rewritten attention of a few tokens, 4 query heads and 2 key heads, and the report."""
    inputs = [random(2, 4, SIZE, 6), random(2, 2, SIZE, 6), random(2, 2, SIZE, 6) + 1, *tensors]
    function = capture(attention, inputs, Mesh(), weights=range(len(inputs)))
    program, report = Intervals()(function.program, function.ctx)
    return replace(function, program=program), report


def plain(q: Tensor, k: Tensor, v: Tensor, change, masked) -> Tensor:
    """Compute softmax(masked(change(q @ k^T))) @ v."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return masked(change(q @ k.transpose(-1, -2))).softmax(-1) @ v


def added(x: Tensor) -> Tensor:
    return x + torch.where(causal(), torch.zeros((), dtype=F64), LOW)


def filled(x: Tensor) -> Tensor:
    return x.masked_fill(~causal(), -torch.inf)


def apart() -> Tensor:
    """Return each key's distance behind the query."""
    i, j = grids(SIZE)
    return i - j


READ = {  # change, masked -> scale, score, terms
    "nothing": (lambda x: x, lambda x: x, (1.0, "", 0)),
    "scaled": (lambda x: x * 0.5, added, (0.5, "", 0)),
    "divided": (lambda x: x / 2, filled, (0.5, "", 0)),
    "capped": (lambda x: torch.tanh(x * 0.5 / 3) * 3, added, (0.5, "tanh(s / 3.0) * 3.0", 0)),
    "of two numbers": (lambda x: x, lambda x: x + torch.where(causal(), 0.0, -torch.inf), (1.0, "", 0)),
    "twice a number": (lambda x: x * 0.5 * 3, added, (0.5, "s * 3.0", 0)),
    "shifted": (lambda x: x * 0.5, lambda x: (y := filled(x)) - y.amax(-1, True), (0.5, "", 0)),
    "used twice": (lambda x: torch.tanh(x) + x, filled, (1.0, "tanh(s) + s", 0)),
    "far keys": (lambda x: x * 0.5 - 0.125 * apart().abs(), filled, (0.5, "s - (abs(t0 - j) * 0.125)", 1)),
    "later keys": (lambda x: x + torch.arange(-20, SIZE)[-SIZE - 2 : -2] * 0.125, filled, (1.0, "s + ((j - 2) * 0.125)", 0)),
    "of each query": (lambda x: x * (1 + torch.arange(SIZE)[:, None]), filled, (1.0, "s * t0", 1)),
}


@pytest.mark.parametrize("name", READ)
def test_scores_are_read(name):
    change, masked, (scale, score, terms) = READ[name]
    function, report = reading(lambda q, k, v: plain(q, k, v, change, masked))
    assert report.counts == {"attention_by_interval": 1}, report.notes
    program = function.program
    (node,) = (node for node in program.calls() if node.target is interval_attention)
    assert node.args[6:] == ([], scale, score) and len(node.args[5]) == terms
    assert not any("softmax" in str(node.target) for node in program.calls())
    assert ir.example(node.args[1]).shape[1] == 2  # keys' own heads
    check(function, {}, TOLERANCE)


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 1, 1), (2, 4, 1, 1), (4, SIZE, 1)], ids=str)
@pytest.mark.parametrize("shift", [lambda x: x, lambda x: x - x.amax(-1, True), lambda x: x - x.max(-1, keepdim=True).values])
def test_sinks_are_read_and_keep_their_gradient(shift, shape):
    def attention(q, k, v, sinks):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = torch.cat([filled(q @ k.mT * 0.5), sinks.expand(2, 4, SIZE, 1)], -1)
        return shift(scores).softmax(-1)[..., :-1] @ v

    function, report = reading(attention, random(*shape))
    assert report.counts == {"attention_by_interval": 1}, report.notes
    (node,) = (node for node in function.program.calls() if node.target is interval_attention)
    assert len(node.args[6]) == 1 and node.args[7:] == (0.5, "")
    assert not any("softmax" in str(node.target) for node in function.program.calls())
    check(function, {}, TOLERANCE)


def cut_mask() -> Tensor:
    """Return a causal mask, of which the first keys were cut off."""
    i, j = torch.arange(SIZE)[:, None], torch.arange(2 * SIZE)
    return torch.where(j <= i + SIZE, torch.zeros((), dtype=F64), -torch.inf)[:, SIZE:]


LEFT = {
    "a mask of -1e4": (lambda q, k, v: plain(q, k, v, lambda x: x + torch.where(causal(), 0.0, -1e4), lambda x: x), "computed with"),
    "a bias of pairs": (lambda q, k, v: plain(q, k, v, lambda x: x + torch.sin(apart() * apart() * 1.0), filled), "computed with"),
    "a query that might see nothing": (
        lambda q, k, v: plain(q, k, v, lambda x: x, lambda x: x.masked_fill(apart() <= 0, LOW)), "might see no key",
    ),
    "a mask cut afterwards": (lambda q, k, v: plain(q, k, v, lambda x: x + cut_mask(), lambda x: x), "transposed or sliced afterwards"),
    "a mask transposed afterwards": (
        lambda q, k, v: plain(q, k, v, lambda x: x + torch.where(apart() <= 0, torch.zeros((), dtype=F64), -torch.inf).transpose(0, 1), lambda x: x),
        "transposed or sliced afterwards",
    ),
    "two columns of sinks": (
        lambda q, k, v: torch.cat([filled(q @ k.repeat_interleave(2, 1).mT), q[..., :2]], -1).softmax(-1)[..., :-2]
        @ v.repeat_interleave(2, 1), "columns that are not keys",
    ),
    "a sink that is a key": (
        lambda q, k, v: torch.cat([filled(q @ k.repeat_interleave(2, 1).mT), q[..., :1]], -1).softmax(-1)[..., 1:]
        @ v.repeat_interleave(2, 1), "columns that are not keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_none_of_it_stays_and_the_report_says_why(name):
    attention, reason = LEFT[name]
    function, report = reading(attention)
    assert report.counts == {"attention_by_interval": 0}
    (note,) = report.notes
    assert "stays written out: " in note and reason in note, note
    assert any("softmax" in str(node.target) for node in function.program.calls())


def test_slopes_that_are_learned_keep_their_gradient():
    def attention(q, k, v, slopes):
        return plain(q, k, v, lambda x: x + slopes * -apart(), filled)

    _, report = reading(attention, random(4, 1, 1))
    assert report.counts == {"attention_by_interval": 0} and "may need a gradient" in report.notes[0]


def test_dropout_of_weights_stays():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, attn_implementation="eager", attention_dropout=0.1)).train()
    _, report = Intervals()(*capture_model(model, zoo.loss_fn, zoo.batch(), torch.device("cpu")))
    assert report.counts == {"attention_by_interval": 0} and "dropout draws a random number" in report.notes[0]


# ---- models ----------------------------------------------------------------------------------------

SHAPE = {**zoo.COMMON, "num_attention_heads": 4, "num_key_value_heads": 2}
CAPPED = {**SHAPE, "head_dim": 12, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12}
SUNK = {**SHAPE, "head_dim": 12, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}  # fmt: skip
MODELS = {
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**SUNK)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**CAPPED, attn_implementation="eager")),
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(vocab_size=zoo.VOCAB, d_model=48, n_layers=2, n_heads=4, max_seq_len=32)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, attn_implementation="eager")),
}
ROUNDED = 3e-6  # these compute their softmax, or its operand, in fp32


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(zoo, "MODELS", zoo.MODELS | MODELS)
    return zoo.build


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), in_turn(MODELS, [{"cp": 2, "tp": 2}, {"cp": 4}]), ids=str)
def test_models_that_write_it_out_train_as_on_one_device(name, mesh, built):
    model, data, sgd = built(name), [zoo.batch() for _ in LRS], {"name": "sgd"}
    metrics, state = train_plainly(model, zoo.loss_fn, data, sgd)
    step = compile_lockstep(model, zoo.loss_fn, data[0], mesh, sgd)
    (of_intervals,) = (record for record in step.report["passes"] if record["name"] == "intervals")
    assert of_intervals["report"]["counts"] == {"attention_by_interval": 2}
    for actual, wanted in zip(train_step(step, data), metrics, strict=True):
        assert_same(actual, wanted, ROUNDED)
    actual = step.state_dict()
    names = actual.keys() & state.keys()  # `state` has tied ones twice, and no buffers that are not persistent
    assert_same({key: actual[key] for key in names}, {key: state[key] for key in names}, ROUNDED)
