"""Head and loss in chunks of tokens: the results of one device, with only one chunk's logits at a time."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
import zoo
from joint_programs import body
from oracle import SEQ_LEN, VOCAB, batches, compile_lockstep, llama, llama_loss, train_step, trained_alike
from rule_harness import capture as capture_function
from rule_harness import check, sharded
from sweeps import in_turn, quick
from torch import Tensor, nn
from verified import apply

from compiler_trainer.capture.capture import capture
from passes.idioms.chunk_loss import ChunkLoss
from passes.ir.mesh import Mesh
from passes.ir.printer import print_program
from passes.memory.chunked import Head, linear_cross_entropy
from passes.memory.chunked_tokens import linear_cross_entropies
from passes.precision.float8 import Float8
from passes.rules.roles import roles
from passes.sharding.infer import infer
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place

MESHES = ({"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2, "tp": 2}, {})
CHUNKS = {"chunk_loss": {"chunks": 3}}


# ---- models --------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A model with an embedding, a layer and a head, which may be the embedding."""

    def __init__(self, tied=False, bias=False, dim=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.up, self.down = nn.Linear(dim, 13), nn.Linear(13, dim)
        self.head = None if tied else nn.Linear(dim, VOCAB, bias=bias)
        self.scale = nn.Parameter(torch.full((), 0.7))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(tokens)
        return self.head(x) if self.head else F.linear(x, self.embed.weight)


def reader(**changes) -> Reader:
    torch.manual_seed(0)
    return Reader(**changes).double()


def flat(x: Tensor, batch, **options) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), batch["labels"].flatten(), **options)


def plain(model, batch):
    return flat(model(batch["tokens"]), batch)


def soft_cap(model, batch):
    return flat(torch.tanh(model(batch["tokens"]) / 3.0) * 3.0, batch)


def scaled_sum(model, batch):
    return flat(2 * model(batch["tokens"]), batch, reduction="sum") / 35


def by_matrix(model, batch):
    return flat(model.hidden(batch["tokens"]) @ model.head.weight.t() + model.head.bias, batch)


def by_addmm(model, batch):
    x = torch.addmm(model.head.bias, model.hidden(batch["tokens"]).flatten(0, 1), model.head.weight.t())
    return F.cross_entropy(x, batch["labels"].flatten())


def of_logarithms(model, batch):
    return F.nll_loss(model(batch["tokens"]).log_softmax(-1).flatten(0, 1), batch["labels"].flatten())


def classes_first(model, batch):
    return F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"])


def shifted(model, batch):
    """Compute the loss if labels are the tokens, shifted by one."""
    x, labels = model(batch["tokens"])[..., :-1, :].contiguous(), batch["tokens"][..., 1:].contiguous()
    return F.cross_entropy(x.view(-1, VOCAB), labels.view(-1))


def ignoring_a_class(model, batch):
    return flat(model(batch["tokens"]), {"labels": batch["labels"].clamp(min=0)}, ignore_index=0)


def by_token(model, batch):
    """Weigh the losses of tokens, then of samples, which needs more than a sum over all tokens."""
    losses = flat(model(batch["tokens"]), batch, reduction="none").view(batch["labels"].shape)
    return F.softplus((losses * batch["tokens"]).sum(1) / VOCAB).mean()


def by_token_of_logarithms(model, batch):
    logs = torch.tanh(model(batch["tokens"]) / 3.0).log_softmax(-1).transpose(1, 2)
    return F.nll_loss(logs, batch["labels"], reduction="none").square().mean()


LOSSES = {
    "by token": (by_token, {"bias": True}),
    "by token of logarithms": (by_token_of_logarithms, {"tied": True}),
    "plain": (plain, {}),
    "tied": (plain, {"tied": True}),
    "bias": (plain, {"bias": True}),
    "soft-cap": (soft_cap, {"tied": True}),
    "scaled sum": (scaled_sum, {}),
    "by a matrix": (by_matrix, {"bias": True}),
    "addmm": (by_addmm, {"bias": True}),
    "of logarithms": (of_logarithms, {}),
    "classes first": (classes_first, {"bias": True}),
    "shifted": (shifted, {"tied": True}),
    "ignoring a class": (ignoring_a_class, {"bias": True}),
}
SGD = {"name": "sgd", "max_norm": None}  # reveals a wrong factor of a gradient


def said_by(step, name="chunk_loss"):
    return next(p["report"] for p in step.report["passes"] if (p["program"], p["name"]) == ("forward", name))


# ---- by value ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "mesh", "chunks"), in_turn(LOSSES, MESHES, (3, 8, 2)))
@pytest.mark.sample(2)
def test_updates_are_those_of_eager_pytorch(loss, mesh, chunks):
    """Compare in fp64 to 1e-10: five sequences of seven tokens, 61 classes, some ignored labels.

    Nothing divides evenly.
    """
    fn, changes = LOSSES[loss]
    data = [{key: batch[key] for key in ("tokens", "labels")} for batch in batches()]
    model = reader(**changes)
    step = trained_alike(model, lambda m, b: fn(m, b) + 0 * m.scale, data, mesh, SGD, passes={"chunk_loss": {"chunks": chunks}})
    assert said_by(step)["counts"]["losses"] == 1


@pytest.mark.parametrize("mesh", quick(MESHES, 4), ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.sample(2)
def test_a_decoder_is_trained_alike(mesh, chunks):
    passes = {"chunk_loss": {"chunks": chunks}}
    step = trained_alike(llama(tied=chunks == 3), llama_loss, batches(), mesh, passes=passes)
    assert said_by(step)["counts"].get("losses", 0) == (chunks > 1)
    assert not said_by(step, "shard")["counts"]["unknown"]


@pytest.mark.parametrize("mesh", quick(MESHES, 0, 4), ids=str)
def test_microbatches(mesh):
    trained_alike(llama(), llama_loss, batches(rows=6), mesh, microbatches=2, passes=CHUNKS)


@pytest.mark.parametrize("mesh", quick(({"dp_shard": 2, "tp": 2}, {"cp": 2}), 0), ids=str)
@pytest.mark.full
def test_numeric_verification_agrees(mesh):
    trained_alike(llama(), llama_loss, batches(), mesh, passes=CHUNKS | {"verify": "numeric"})


def test_more_chunks_than_tokens_and_a_chunk_without_labels():
    data = batches()
    for batch in data:
        batch["labels"][:3] = -100
    step = trained_alike(llama(), llama_loss, data, {}, passes={"chunk_loss": {"chunks": 1000}})
    assert "in 35 chunks" in said_by(step)["notes"][0]


def test_a_frozen_head_has_no_gradient():
    model = reader()
    model.head.weight.requires_grad_(False)
    data = [{key: batch[key] for key in ("tokens", "labels")} for batch in batches()]
    trained_alike(model, lambda m, b: plain(m, b) + 0 * m.scale, data, {"tp": 2}, SGD, passes=CHUNKS)


def test_evaluation_makes_no_gradients():
    flops = []
    for passes in ({}, CHUNKS):
        step = compile_lockstep(llama(), llama_loss, batches()[0], {"tp": 2}, passes=passes, evaluate=True)
        for batch in batches():
            assert step.evaluate(batch) == pytest.approx(llama_loss(llama(), batch).item(), abs=1e-12)
        flops.append([p["accounting"]["flops"]["forward"] for p in step.report["passes"] if p["program"] == "evaluate"][-1])
    assert flops[0] == flops[1]


# ---- the rule --------------------------------------------------------------------------------------------

HEAD = (torch.randn(8, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64),
        torch.tensor([0, 6, -1, 3, 3, -1, 2, 5]), torch.randn(7, dtype=torch.float64))


def summed(hidden, weight, labels, bias):
    return linear_cross_entropy(hidden, weight, labels, bias, ["div 2.0", "tanh", "mul 3.0"], -1, 3)


def by_tokens(hidden, weight, labels, bias):
    return linear_cross_entropies(hidden, weight, labels, bias, ["div 2.0", "tanh", "mul 3.0"], -1, 3)


@pytest.mark.parametrize(("ranks", "fill"), [(2, 0.0), (3, None), (4, None)])
@pytest.mark.parametrize("weights", [(), (1, 3)])
@pytest.mark.parametrize("taken", [summed, by_tokens])
@pytest.mark.sample(4)
def test_the_rule_by_value(ranks, fill, weights, taken):
    """Shard each dim of each operand, evenly and unevenly, with padding of zeros and of garbage."""
    for axis in ("tp", "dp_shard"):
        function = capture_function(taken, HEAD, Mesh.of({axis: ranks}), weights)
        for i, dim in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]:
            check(function, {i: sharded(HEAD[i].shape, dim, axis, fill)})
    pair = {0: sharded(HEAD[0].shape, 0, "tp", fill), 1: sharded(HEAD[1].shape, 0, "tp", fill)}
    check(capture_function(taken, HEAD, Mesh.of({"tp": ranks}), weights), pair)


@pytest.mark.parametrize("taken", [summed, by_tokens])
def test_what_ranks_share_is_summed_once(taken):
    """Check three ranks and five classes; with four classes one rank has only padding."""
    tensors = (HEAD[0], HEAD[1][:5], HEAD[2].clamp(max=4), HEAD[3][:5])
    check(capture_function(taken, tensors, Mesh.of({"tp": 4}), (1, 3)), {1: sharded((5, 5), 0, "tp", None)})


# ---- bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", quick(MESHES, 1), ids=str)
@pytest.mark.full
def test_the_same_bits_again_and_under_any_policy(mesh):
    model, data = llama(n_layers=2, dtype=torch.float32), batches()
    policies = ("full", "full", "none")
    steps = [compile_lockstep(model, llama_loss, data[0], mesh, passes=CHUNKS | {"remat": {"policy": p}}) for p in policies]
    result = [(train_step(step, data), step.state_dict()) for step in steps]
    for (metrics, state), (others, again) in pairwise(result):
        assert metrics == others and all(torch.equal(state[name], again[name]) for name in state)


def test_gradients_of_the_weight_are_added_in_fp32():
    """Check that the sum of 64 chunks in bf16 is as near to fp64's as that of one matmul over all tokens."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 16), torch.randn(50, 16)
    labels, ids = torch.randint(0, 50, (512,)), torch.arange(50)

    def gradient(dtype, chunks):
        head = Head((), -100, chunks, classes=50)
        return head.run(head.chunk, hidden.to(dtype), weight.to(dtype), labels, ids)[2]

    exact = gradient(torch.float64, 1)
    full, parts = (gradient(torch.bfloat16, chunks) for chunks in (1, 64))
    assert parts.dtype == torch.float32
    assert (parts - exact).norm() <= 1.5 * (full - exact).norm()


# ---- memory ------------------------------------------------------------------------------------------------


def token_loss(model, batch):
    logits = model(batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").square().mean()


def long(chunks, loss=llama_loss):
    """Return a step of 1,024 tokens and 4,000 classes on one rank: logits of 15.6 MiB."""
    model = llama(dtype=torch.float32, vocab_size=4000)
    tokens = torch.randint(0, 4000, (1, 1024), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(1024)[None]}
    return compile_lockstep(model, loss, batch, {}, passes={"chunk_loss": {"chunks": chunks}})


def peak(step):
    return [p["accounting"]["peak_bytes"] for p in step.report["passes"] if p["program"] == "step"][-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", [llama_loss, token_loss])
def test_no_more_logits_are_alive_than_of_a_chunk(loss):
    logits = 1024 * 4000 * 4
    full, chunked = long(1, loss), long(16, loss)
    assert peak(full) > 3 * logits and peak(chunked) < logits


# ---- which heads -------------------------------------------------------------------------------------------


def captured(loss_fn, model=None, mesh=()):
    batch = batches(1)[0]
    batch.pop("positions")
    program, ctx = capture(model or reader(bias=True), loss_fn, batch, torch.device("cpu"))
    return replace(program, mesh=Mesh.of(dict(mesh))), ctx


def test_the_graph_before_and_after():
    program, ctx = captured(soft_cap)
    text = print_program(program)
    result, report = ChunkLoss(4)(program, ctx)
    assert print_program(program) == text
    assert body(result).splitlines()[-5:] == [
        "%reshape = reshape(%add, [-1, 8])",
        "%linear_cross_entropy = linear_cross_entropy(%reshape, %p_model_head_weight, %view_1, %p_model_head_bias, "
        '["div 3.0", "tanh", "mul 3.0"], -100, 4)',
        "%ne = ne.Scalar(%view_1, -100)",
        "%sum_1 = sum(%ne)",
        "%div_1 = div.Tensor(%linear_cross_entropy, %sum_1)",
    ]


SMALL = 5 * SEQ_LEN * VOCAB * 8  # bytes of the logits


@pytest.mark.parametrize(("mesh", "share"), [({}, 1), ({"dp_shard": 5}, 5), ({"cp": 7, "tp": 61}, 427)])
def test_by_itself_a_head_is_taken_in_chunks_if_a_ranks_logits_are_large(mesh, share):
    program, ctx = captured(plain, mesh=mesh)
    limit = SMALL / share / 2**20
    whole, report = ChunkLoss(None, limit)(program, ctx)
    assert whole is program and report.counts == {"losses": 0, "saved_bytes": 0}
    assert f"0 of 1 losses in chunks; the largest logits of a rank have {SMALL // share:,} bytes" in str(report.effects[0])
    _, report = ChunkLoss(None, limit * 0.26)(program, ctx)
    chunk_bytes = -(-SMALL // share // 4)
    assert report.counts == {"losses": 1, "saved_bytes": SMALL // share - chunk_bytes}
    assert f"1 of 1 losses in chunks; the largest logits of a rank have {chunk_bytes:,} bytes" in str(report.effects[0])
    assert "in 4 chunks" in report.notes[0]


def smoothed(model, batch):
    return flat(model(batch["tokens"]), batch, label_smoothing=0.1)


def z_loss(model, batch):
    x = model(batch["tokens"])
    return flat(x, batch) + x.logsumexp(-1).square().mean()


def learned_scale(model, batch):
    return flat(model(batch["tokens"]) * model.scale, batch)


def squared(model, batch):
    return model(batch["tokens"]).square().mean()


def weighed(model, batch):
    return flat(model(batch["tokens"]), batch, weight=model.head.bias.detach().exp())


@pytest.mark.parametrize(("loss", "why"), [
    (smoothed, r"%cross_entropy_loss \(.*\) has labels that are not class ids, or label smoothing"),
    (z_loss, r"%linear_2 is read by %(view|flatten) .*, %logsumexp"),
    (learned_scale, r"%linear_2 is followed by %mul_?\d* \(test_chunk_loss.py:\d+\)"),
    (squared, r"%linear_2 is followed by %(square|pow_1) "),
    (weighed, r"%cross_entropy_loss \(.*\) has class weights"),
])
def test_large_logits_that_stay_whole_are_named(loss, why):
    program, ctx = captured(loss)
    result, report = ChunkLoss(None, 1e-3)(program, ctx)
    assert result is program and report.counts == {"losses": 0, "saved_bytes": 0}
    (note,) = report.notes
    assert re.search(r"%linear_2 \(test_chunk_loss.py:\d+\): .* GiB of logits on a rank are not chunked: " + why, note), note
    (effect,) = ChunkLoss(4)(program, ctx)[1].effects
    assert effect.unmet == f"{note}; set it to null"


def test_small_jobs_keep_their_graphs():
    program, ctx = captured(z_loss)
    assert ChunkLoss()(program, ctx)[0] is program


# ---- what other passes see -----------------------------------------------------------------------------------


def used_and_split(program, ctx):
    """Return the uses of parameters, and the plan of tensor parallelism."""
    program, _ = Normalize()(replace(program, mesh=Mesh.of({"tp": 2})), ctx)
    return roles(program), infer(program, 2)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma"])
@pytest.mark.sample(2)
def test_models_of_others_have_the_plan_that_they_had(name):
    program, ctx = capture(zoo.build(name), zoo.loss_fn, zoo.batch(), torch.device("cpu"))
    result, report = ChunkLoss(4)(program, ctx)
    assert report.counts["losses"] == 1
    assert used_and_split(result, ctx) == used_and_split(program, ctx)


def test_a_loss_inside_a_model_with_a_soft_cap_is_found():
    sizes = {**zoo.COMMON, "num_key_value_heads": 2, "head_dim": 8}
    model = tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, final_logit_softcapping=30.0, use_cache=False)).double()
    program, ctx = capture(model, lambda m, b: m(input_ids=b["tokens"], labels=b["labels"]).loss, zoo.batch(), torch.device("cpu"))
    result, _ = ChunkLoss(4)(program, ctx)
    (head,) = result.graph.find_nodes(op="call_function", target=linear_cross_entropy)
    assert head.args[4] == ["div 30.0", "tanh", "mul 30.0", "to float32"]


def test_float8_leaves_the_head_and_takes_the_layers():
    model = llama(dtype=torch.float32, dim=32, n_heads=2, n_kv_heads=2, ffn_dim=48, vocab_size=64)
    program, ctx = capture(model, llama_loss, batches(1)[0], torch.device("cpu"))
    program = replace(program, mesh=Mesh.of({"dp_shard": 2}))
    full, chunked = (apply([*steps, Normalize(), Place(), Float8("rowwise")], program, ctx)[1] for steps in ((), (ChunkLoss(3),)))
    assert full.counts["linear"] == chunked.counts["linear"] == 7
    assert chunked.effects[0].detail == "1 not: heads whose losses are in chunks"


@pytest.mark.parametrize("mesh", quick(({}, {"dp_shard": 2, "tp": 2}), 0), ids=str)
@pytest.mark.full
def test_in_bf16_gradients_are_as_near_to_those_in_fp64(mesh):
    data = batches(1)
    wanted = compile_lockstep(llama(), llama_loss, data[0], mesh, SGD)
    cast = {"param_dtype": "bfloat16"}
    steps = [compile_lockstep(llama(dtype=torch.float32), llama_loss, data[0], mesh, SGD, passes={"cast": cast} | passes)
             for passes in ({}, CHUNKS)]
    for step in (wanted, *steps):
        step(data[0], 1.0)
    exact = wanted.state_dict()
    full, parts = (sum((state[n] - exact[n]).norm() for n in exact) for state in (s.state_dict() for s in steps))
    assert parts <= 1.2 * full


def test_each_chunk_is_a_call_of_one_body():
    step = compile_lockstep(llama(), llama_loss, batches(rows=6)[0], {"dp_shard": 2}, passes={"chunk_loss": {"chunks": 7}})
    notes = [p["report"]["notes"] for p in step.report["passes"] if (p["program"], p["name"]) == ("step", "segment")][0]
    assert any(re.match(r"forward_\d: 6 calls", note) for note in notes), notes  # the last one is merged with the operators after it
