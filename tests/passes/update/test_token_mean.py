"""Microbatches change no number: a mean over labels covers those of the full batch, however they are distributed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from joint_programs import Tiny
from oracle import assert_same, batches, compile_lockstep, llama, llama_loss, train_plainly, train_step
from sweeps import in_turn
from torch import nn

from compiler_trainer.capture.capture import capture
from compiler_trainer.training.evaluate import means
from passes.ir.printer import print_program
from passes.ir.spec import Spec
from passes.sharding.normalize import Normalize
from passes.update.token_mean import TokenMean, terms

MESHES = [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"cp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
PLAIN = {"name": "sgd"}
SAME = 1e-12
ROWS = 8


def uneven(first: int = 0):
    """Return batches of 8 samples: the first two have `first` labels each, the others more from sample to sample."""
    result = batches(rows=ROWS)
    for batch in result:
        for row, labels in enumerate(batch["labels"]):
            labels[first if row < 2 else row - 1 :] = -100
    return result


def summed(model, batch, chosen=lambda labels: labels != -100):
    """Return (sum of the losses of tokens, their mask)."""
    logits, labels = model(batch["tokens"], batch["positions"]), batch["labels"]
    mask = chosen(labels)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.where(labels >= 0, 0).flatten(), reduction="none")
    return (losses.view_as(mask) * mask).sum(), mask


def masked(model, batch):
    total, mask = summed(model, batch)
    return total / mask.sum().clamp(min=1)


def z_loss(model, batch):
    """Return two sums over the same labels, and one over all tokens."""
    logits, mask = model(batch["tokens"], batch["positions"]), batch["labels"] != -100
    squares = logits.logsumexp(-1).square()
    total, _ = summed(model, batch)
    return 0.5 * (total + 0.1 * (squares * mask).sum()) / mask.to(logits.dtype).sum() + 0.01 * squares.mean()


def two_masks(model, batch):
    (total, mask), (odd, few) = summed(model, batch), summed(model, batch, lambda labels: labels % 2 == 1)
    return total / mask.sum() - 0.3 * (odd / few.sum())


def shifted(model, batch):
    """Return a loss as in transformers: labels are shifted inside the loss, and padded."""
    logits = model(batch["tokens"], batch["positions"])
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), label_smoothing=0.1)


def by_log_softmax(model, batch):
    logs = model(batch["tokens"], batch["positions"]).log_softmax(-1)
    return F.nll_loss(logs.flatten(0, 1), batch["labels"].flatten())


def train_lockstep(loss, data, mesh, microbatches, **options):
    step = compile_lockstep(llama(), loss, data[0], mesh, PLAIN, microbatches=microbatches, **options)
    return step, train_step(step, data)


def report_of(step):
    return next(entry["report"] for entry in step.report["passes"] if entry["name"] == "token_mean")


@pytest.mark.parametrize(("mesh", "microbatches"), in_turn(MESHES, [1, 2, 4]))
@pytest.mark.sample(2)
def test_steps_are_those_of_the_whole_batch(mesh, microbatches):
    data = uneven()  # of 4 microbatches, the first has no label
    metrics, state = train_plainly(llama(), llama_loss, data, PLAIN)
    step, result = train_lockstep(llama_loss, data, mesh, microbatches)
    for ours, theirs in zip(result, metrics, strict=True):
        assert_same(ours, theirs, SAME)
    assert_same(step.state_dict(), state, SAME)
    if microbatches > 1:
        report = report_of(step)
        assert report["counts"] == {"means": 1} and not (report["notes"] or report["remarks"])


def flat(model, batch):
    """Return a mean by weights of another dtype, added up as one row."""
    total, mask = summed(model, batch)
    return total / mask.float().view(-1).sum(dtype=torch.float64)


def cut_after_flattening(model, batch):
    """Return a mean over labels of which the last of the last sample does not count."""
    total, mask = summed(model, batch)
    return total / mask.view(1, -1)[:, :-1].sum()


@pytest.mark.parametrize(("loss", "counted", "left"), [
    (masked, 1, 0), (z_loss, 1, 1), (two_masks, 2, 0), (shifted, 1, 0), (by_log_softmax, 1, 0), (flat, 1, 0),
])
@pytest.mark.sample(3)
def test_losses_of_ones_own_are_counted_as_well(loss, counted, left):
    data = uneven(first=1)
    metrics, state = train_plainly(llama(), loss, data, PLAIN)
    step, result = train_lockstep(loss, data, {"dp_shard": 2}, 4)
    for ours, theirs in zip(result, metrics, strict=True):
        assert_same(ours, theirs, SAME)
    assert_same(step.state_dict(), state, SAME)
    assert (report_of(step)["counts"]["means"], len(report_of(step)["notes"])) == (counted, left)


def test_a_loss_in_chunks_is_counted_as_well():
    data = uneven()
    metrics, state = train_plainly(llama(), llama_loss, data, PLAIN)
    step, result = train_lockstep(llama_loss, data, {"dp_shard": 2}, 4, passes={"chunk_loss": {"chunks": 3}})
    for ours, theirs in zip(result, metrics, strict=True):
        assert_same(ours, theirs, SAME)
    assert_same(step.state_dict(), state, SAME)
    assert report_of(step)["counts"] == {"means": 1}


def by_class(model, batch):
    """Return a mean weighted by classes."""
    logits = model(batch["tokens"], batch["positions"]).flatten(0, 1)
    weight = torch.arange(1, logits.shape[1] + 1).to(logits.dtype)
    return F.cross_entropy(logits, batch["labels"].flatten(), weight)


def by_share(model, batch):
    """Return a mean over labels weighted by the share of their sample, which no sample determines alone."""
    total, mask = summed(model, batch)
    return total / (mask / mask.sum(0, keepdim=True).clamp(min=1)).sum()


def squared(model, batch):
    return llama_loss(model, batch).square()


@pytest.mark.parametrize("loss", [by_class, by_share, squared, cut_after_flattening])
@pytest.mark.sample(1)
def test_other_losses_are_means_over_microbatches_and_the_report_says_so(loss):
    data, model = uneven(first=1), llama()
    step, _ = train_lockstep(loss, data, {"dp_shard": 2}, 4)
    step, fresh = compile_lockstep(model, loss, data[0], {"dp_shard": 2}, PLAIN, microbatches=4), data[0]
    parts = [loss(model, {key: value.chunk(4)[i] for key, value in fresh.items()}).item() for i in range(4)]
    assert step(fresh)["loss"] == pytest.approx(sum(parts) / 4, rel=SAME)
    assert not math.isclose(sum(parts) / 4, loss(model, fresh).item(), rel_tol=1e-6)
    (note,) = report_of(step)["notes"]
    assert "test_token_mean.py:" in note and "the loss has terms averaged over microbatches" in note


def square_of_a_masked_mean(model, batch):
    mask = (batch["labels"] != -100).unsqueeze(-1)
    return (model(batch["tokens"], batch["positions"]) * mask).sum((0, 1)).square().sum() / mask.sum() ** 2


def weights_of_the_batch(model, batch):
    mask = (batch["labels"] != -100).double()
    squares = model(batch["tokens"], batch["positions"]).square().sum(-1)
    return (squares * (mask / mask.sum())).sum() / mask.sum()


def sum_by_a_share(model, batch):
    total, mask = summed(model, batch)
    return total / mask.double().mean() / mask.numel()


def mean_by_a_count(model, batch):
    total, mask = summed(model, batch)
    return total / mask.numel() / mask.sum()


def contrast(model, batch):
    """Return a loss of similarities between the samples of a batch."""
    logits = F.normalize(model(batch["tokens"], batch["positions"]), dim=-1)
    return -(logits.mean(1) @ logits[:, 0].T).log_softmax(1).diagonal().mean()


@pytest.mark.parametrize("loss", [square_of_a_masked_mean, weights_of_the_batch, sum_by_a_share, mean_by_a_count, contrast])
@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.sample(5)
def test_what_is_no_sum_over_samples_is_the_mean_over_microbatches_which_is_said_at_the_start(loss, microbatches):
    batch, model = uneven(first=1)[0], llama()
    step = compile_lockstep(model, loss, batch, {"dp_shard": 2}, PLAIN, microbatches=microbatches)
    parts = [loss(model, {key: value.chunk(microbatches)[i] for key, value in batch.items()}).item() for i in range(microbatches)]
    assert step(batch)["loss"] == pytest.approx(sum(parts) / microbatches, rel=SAME)
    (remark,) = (line for line in step.report["remarks"] if "are no sums over samples" in line)
    assert "test_token_mean.py:" in remark and f"each of train.microbatches={microbatches} computes them" in remark


@torch.library.custom_op("token_mean::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


def test_an_operator_without_a_rule_is_taken_to_mix_no_samples():
    def loss(model, batch):
        total, mask = summed(lambda *inputs: doubled(model(*inputs)), batch)
        return total / mask.sum()

    batch, model = uneven(first=1)[0], llama()
    step = compile_lockstep(model, loss, batch, {"dp_shard": 2}, PLAIN, microbatches=4)
    assert step(batch)["loss"] == pytest.approx(loss(llama(), batch).item(), rel=SAME)
    assert report_of(step)["counts"] == {"means": 1} and not step.report["remarks"]
    step = compile_lockstep(model, lambda model, batch: doubled(model(batch["tokens"], batch["positions"])).mean(), batch, {}, PLAIN, microbatches=4)
    assert "no sums over samples" not in str(step.report["remarks"])


def with_metrics(model, batch):
    """Return a mean over labels, the same as a metric, its perplexity, and a mean over odd labels."""
    loss, (odd, few) = llama_loss(model, batch), summed(model, batch, lambda labels: labels % 2 == 1)
    nll = loss.detach()
    return loss, {"nll": nll, "perplexity": nll.exp(), "halved": 0.5 * nll + 1.0, "odd": odd.detach() / few.sum()}


def test_a_mean_is_whole_whatever_else_uses_it():
    """A metric that is the loss, or a function of it, once made the loss a mean over microbatches."""
    data, model = uneven(first=1), llama()
    metrics, state = train_plainly(llama(), llama_loss, data, PLAIN)
    step, result = train_lockstep(with_metrics, data, {"dp_shard": 2}, 4)
    for ours, theirs in zip(result, metrics, strict=True):
        assert ours["loss"] == ours["nll"] == pytest.approx(theirs["loss"], rel=SAME)
        assert ours["halved"] == pytest.approx(0.5 * theirs["loss"] + 1.0, rel=SAME)
    assert_same(step.state_dict(), state, SAME)
    (note,) = report_of(step)["notes"]
    assert "the metric has terms averaged over microbatches" in note and note.count("test_token_mean.py:") == 1
    _, plain = with_metrics(model, data[0])
    assert result[0]["odd"] == pytest.approx(plain["odd"].item(), rel=SAME)
    assert not math.isclose(result[0]["perplexity"], plain["perplexity"].item(), rel_tol=1e-6)


def used_twice(model, batch):
    loss = llama_loss(model, batch)
    return loss + loss * loss


def test_a_function_of_a_mean_is_averaged_and_the_mean_itself_is_whole():
    batch, model = uneven(first=1)[0], llama()
    step = compile_lockstep(model, used_twice, batch, {"dp_shard": 2}, PLAIN, microbatches=4)
    parts = [llama_loss(model, {key: value.chunk(4)[i] for key, value in batch.items()}).item() for i in range(4)]
    expected = llama_loss(model, batch).item() + sum(part * part for part in parts) / 4
    assert step(batch)["loss"] == pytest.approx(expected, rel=SAME)


def balanced(model, batch):
    """Return a mean over labels, and a product of means that stands for a balance loss."""
    logits = model(batch["tokens"], batch["positions"])
    shares = logits.softmax(-1).mean((0, 1))
    return llama_loss(model, batch) + (shares * shares).sum()


def test_what_is_added_to_a_mean_over_labels_stays_a_mean_over_microbatches():
    batch, model = uneven()[0], llama()
    step = compile_lockstep(model, balanced, batch, {"dp_shard": 2}, PLAIN, microbatches=2)
    parts = [{key: value.chunk(2)[i] for key, value in batch.items()} for i in range(2)]
    extra = sum(balanced(model, part) - llama_loss(model, part) for part in parts) / 2
    assert step(batch)["loss"] == pytest.approx((llama_loss(model, batch) + extra).item(), rel=SAME)
    assert report_of(step)["counts"] == {"means": 1} and len(report_of(step)["notes"]) == 1


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_evaluation_is_over_the_whole_batch(mesh):
    batch, model = uneven()[0], llama()
    step = compile_lockstep(model, llama_loss, batch, mesh, PLAIN, microbatches=4, evaluate=True)
    assert step.evaluate(batch) == pytest.approx(llama_loss(model, batch).item(), rel=SAME)


def joined(parts):
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_the_metrics_of_an_evaluation_are_means_over_all_its_batches(mesh):
    """Each by its own count: a mean over odd labels is not weighted by all labels, and a batch without any adds nothing."""
    data, model = uneven()[:3], llama()
    data[1]["labels"][:, 3:] = -100
    data[2]["labels"] = data[2]["labels"].where(data[2]["labels"] % 2 == 0, -100)
    step = compile_lockstep(model, with_metrics, data[0], mesh, PLAIN, microbatches=4, evaluate=True)
    result, labels = means(step, [("a", batch) for batch in data])
    loss, metrics = with_metrics(model, joined(data))
    assert labels == (joined(data)["labels"] != -100).sum()
    assert {name: result[name] for name in ("loss", "nll", "halved", "odd")} == pytest.approx(
        {"loss": loss.item()} | {name: metrics[name].item() for name in ("nll", "halved", "odd")}, rel=SAME)
    assert [name for name in step.weights(data[2]) if step.weights(data[2])[name] == 0] == ["odd"]
    assert "perplexity" not in step.weights(data[0])


def test_a_microbatch_without_labels_is_nothing_to_skip():
    data = uneven()
    metrics, state = train_plainly(llama(), llama_loss, data, PLAIN)
    step, result = train_lockstep(llama_loss, data, {"dp_shard": 2}, 4, skip_nonfinite=True)
    assert [m["loss"] for m in result] == pytest.approx([m["loss"] for m in metrics], rel=SAME)
    assert_same(step.state_dict(), state, SAME)
    nothing = {**data[0], "labels": torch.full_like(data[0]["labels"], -100)}
    assert math.isnan(step(nothing)["loss"])  # as is the mean of a full batch without labels
    assert_same(step.state_dict(), state, SAME)


def test_numbers_are_verified():
    batch = uneven(first=1)[0]
    compile_lockstep(llama(), masked, batch, {"dp_shard": 2}, PLAIN, microbatches=2, passes={"verify": "numeric"})


TEXT = """\
# inputs: 4
%p_model_weight = parameter "weight" : f32[3] [3]
%values_0 = batch "x" : f32[4, 3] [4, 3]
%values_1 = batch "y" : i64[4, 3] [4, 3]
%count_0 = scalar "count_0" : i64[] []
# count_0: the sum, over all samples of 2 microbatches, of
%values_1 = placeholder(values_1) : i64[4, 3]
%ne = ne.Scalar(%values_1, 0) : bool[4, 3]
return [%ne]
# outputs: 1
loss "loss" = %mul_2 : f32[] []
# nodes: 7
%ne = ne.Scalar(%values_1, 0) : bool[4, 3]
%mul = mul.Tensor(%values_0, %p_model_weight) : f32[4, 3]
%mul_1 = mul.Tensor(%mul, %ne) : f32[4, 3]
%sum_1 = sum(%mul_1) : f32[]
%clamp_1 = clamp(%count_0, 1) : i64[]
%div_1 = div.Tensor(%sum_1, %clamp_1) : f32[]
%mul_2 = mul.Tensor(%div_1, 2) : f32[]
"""


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def test_the_text_of_a_count():
    def loss(model, batch):
        mask = batch["y"] != 0
        return (model(batch["x"]) * mask).sum() / mask.sum().clamp(min=1)

    batch = {"x": torch.ones(4, 3), "y": torch.ones(4, 3, dtype=torch.int64)}
    program, ctx = capture(Scores(), loss, batch, torch.device("cpu"))
    program, _ = Normalize()(program, ctx)
    before = print_program(program)
    after, report = TokenMean(2)(program, ctx)
    assert print_program(program) == before
    assert report.counts == {"means": 1} and not report.notes
    lines = [line.partition("   #")[0] for line in print_program(after).splitlines()[2:]]
    assert lines == TEXT.splitlines()


def test_a_sum_of_more_terms_than_python_has_frames_is_taken_apart():
    tiny = Tiny()
    total = x = tiny.input("x", Spec.whole(()))
    for _ in range(1500):  # one term per layer
        total = tiny.call(torch.ops.aten.add.Tensor, total, x)
    assert terms([total]) == [x]


def squares_by(divisor):
    def loss(model, batch):
        squares = model(batch["tokens"], batch["positions"]).square()
        return squares.sum() / divisor if divisor else squares.mean()

    return loss


@pytest.mark.parametrize(("divisor", "is_said"), [(None, False), (ROWS // 2, False), (1000, True), (1, True)], ids=str)
def test_a_sum_by_a_constant_is_a_mean_over_microbatches_which_is_said_at_the_start(divisor, is_said):
    batch, model, loss = uneven()[0], llama(), squares_by(divisor)
    step = compile_lockstep(model, loss, batch, {"dp_shard": 2}, PLAIN, microbatches=2)
    parts = [loss(model, {key: value.chunk(2)[i] for key, value in batch.items()}).item() for i in range(2)]
    assert step(batch)["loss"] == pytest.approx(sum(parts) / 2, rel=SAME)
    remarks = [line for line in step.report["remarks"] if "a sum divided by a constant is divided by train.microbatches=2" in line]
    assert bool(remarks) == is_said and all("test_token_mean.py:" in line for line in remarks)
