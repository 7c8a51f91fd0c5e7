"""Preference pairs: each loss trains as a plain loop does, on any mesh; DPO with its own reference."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from byte_tokenizer import write_tokenizer
from oracle import ADAMW, EXACT, LRS, assert_same, compile_lockstep, llama, train_plainly, train_step

import compiler_trainer as ct
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    ANSWER_REFERENCE,
    REFERENCE,
    CpoConfig,
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    SimpoConfig,
)
from compiler_trainer.config.validate import validate
from compiler_trainer.models.preference import LOSSES, judged_loss, log_odds, preference_loss, reference
from compiler_trainer.models.subject import plain_logits
from compiler_trainer.training.reference import FILE

ROW, VOCAB = 13, 61


def pairs(answers=2, rows=6, seed=3):
    """Return batches of pairs of uneven lengths, with `answers` of them in a row; the last row of each batch is only filler.

    The first row has no third answer.
    """
    draw = torch.Generator().manual_seed(seed)
    result = []
    for _ in LRS:
        tokens = torch.randint(0, VOCAB, (rows, ROW), generator=draw)
        labels, positions, documents = torch.full_like(tokens, -100), torch.zeros_like(tokens), torch.full_like(tokens, 2)
        for row in range(rows):
            sizes = torch.randint(2, ROW // 2, (2,), generator=draw).tolist()
            bounds = [0, sizes[0], sum(sizes), ROW]
            for document, (start, end) in enumerate(zip(bounds, bounds[1:])):
                documents[row, start:end] = document
                positions[row, start:end] = torch.arange(end - start)
                if document < answers and row < rows - 1 and (row, document) != (0, 2):
                    labels[row, start + 1 : end - 1] = tokens[row, start + 2 : end]
                    labels[row, start] = tokens[row, start + 1]
        known = {name: -size * torch.rand(rows, generator=draw) for name, size in zip(REFERENCE[:answers], (3, 3, 50))}
        counts = (torch.arange(rows) < rows - 1).long()
        result.append({"tokens": tokens, "labels": labels, "positions": positions, "documents": documents, "pairs": counts, **known})
    return result


def by_hand(model, batch):
    """Return the log-probabilities of each answer, from a separate run on its document."""
    result = torch.zeros(len(batch["tokens"]), 3, dtype=torch.float64)
    for row, documents in enumerate(batch["documents"]):
        for document in range(3):
            there = documents == document
            tokens, labels = batch["tokens"][row][there], batch["labels"][row][there]
            logs = model(tokens[None], torch.arange(len(tokens))[None])[0].log_softmax(-1)
            result[row, document] = sum(logs[i, label] for i, label in enumerate(labels) if label != -100)
    return result


def plain_dpo(model, batch, beta=0.3, smoothing=0.1):
    """Return the loss of equation 7, pair by pair."""
    answers, losses = by_hand(model, batch), []
    for row in range(len(answers)):
        if batch["pairs"][row]:
            chosen, rejected = (answers[row, i] - batch[name][row] for i, name in enumerate(REFERENCE[:2]))
            wins = torch.sigmoid(beta * (chosen - rejected))
            losses.append(-(1 - smoothing) * wins.log() - smoothing * (1 - wins).log())
    return sum(losses) / len(losses)


DPO = DpoConfig("dpo", beta=0.3, label_smoothing=0.1)


def loss_of(model, batch):
    return preference_loss(plain_logits, DPO, model, batch)


def logistic(x):
    return 1 / (1 + math.e**-x)


def plain_ipo(c, r, counts, beta=0.4):
    return (c / counts[0] - r / counts[1] - 1 / (2 * beta)) ** 2


def plain_simpo(c, r, counts, beta=2.5, gamma=0.7):
    return -logistic(beta * c / counts[0] - beta * r / counts[1] - gamma).log()


def plain_orpo(c, r, counts, beta=0.3):
    odds = [p / (1 - p) for p in (math.e ** (c / counts[0]), math.e ** (r / counts[1]))]
    return -beta * logistic((odds[0] / odds[1]).log()).log()


def plain_cpo(c, r, counts, beta=0.3):
    return -logistic(beta * (c - r)).log()


def plain_kto(c, r, counts, point, beta=0.3, weights=(1.2, 0.7)):
    return (weights[0] * (1 - logistic(beta * (c - point))) + weights[1] * (1 - logistic(beta * (point - r)))) / 2


def plain_dpo_loss(c, r, counts, beta=0.3, smoothing=0.1):
    wins = logistic(beta * (c - r))
    return -(1 - smoothing) * wins.log() - smoothing * (1 - wins).log()


FORMULAS = {  # the loss: its formula for one pair, and its options
    "dpo": (plain_dpo_loss, DpoConfig("dpo", beta=0.3, nll_weight=0.2, label_smoothing=0.1)),
    "ipo": (plain_ipo, IpoConfig("ipo", beta=0.4)),
    "simpo": (plain_simpo, SimpoConfig("simpo", beta=2.5, gamma=0.7)),
    "orpo": (plain_orpo, OrpoConfig("orpo", beta=0.3, nll_weight=0.9)),
    "cpo": (plain_cpo, CpoConfig("cpo", beta=0.3)),
    "kto": (plain_kto, KtoConfig("kto", beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)),
}


def plainly(name, microbatches, model, batch):
    """Return a loss pair by pair, plus the weighted negative log-likelihood of the tokens of all chosen answers.

    KTO's reference point is that of the pair's microbatch.
    """
    (formula, cfg), answers, losses, totals = FORMULAS[name], by_hand(model, batch), [], [0, 0]
    scores = answers[:, : cfg.answers] - torch.stack([batch[name] for name in REFERENCE[: cfg.answers]], 1) if cfg.has_reference else answers
    counts = [[int((labels[documents == i] != -100).sum()) for i in range(3)] for labels, documents in zip(batch["labels"], batch["documents"])]
    for row in batch["pairs"].nonzero().flatten().tolist():
        further = [reference_point(scores, counts, row, len(counts) // microbatches)] if name == "kto" else []
        losses.append(formula(scores[row, 0], scores[row, 1], counts[row], *further))
        totals = [totals[0] - answers[row, 0], totals[1] + counts[row][0]]
    return sum(losses) / len(losses) + cfg.nll_weight * totals[0] / totals[1]


def reference_point(scores, counts, row, size):
    """Return the mean score of the third answers in a row's microbatch of `size` rows, at least 0."""
    unrelated = [scores[i, 2].item() for i in range(row // size * size, row // size * size + size) if counts[i][2]]
    return max(sum(unrelated) / len(unrelated), 0.0) if unrelated else 0.0


MESHES = [({"dp_shard": 2, "cp": 2}, 1), ({"tp": 2, "dp_replicate": 2}, 2), ({"cp": 3}, 3), ({"pp": 2, "dp_shard": 2}, 2)]
IN_CHUNKS = [({"dp_shard": 2}, 2), ({"cp": 2}, 1), ({"tp": 2}, 1), ({"pp": 2, "tp": 2}, 2)]  # 61 classes on two ranks
CASES = [(*case, 1) for case in MESHES] + [(*case, 5) for case in IN_CHUNKS]


def in_chunks(step):
    """Return the number of losses that a step computes in chunks."""
    return next(p["report"]["counts"].get("losses", 0) for p in step.report["passes"] if p["name"] == "chunk_loss")


@pytest.mark.full
@pytest.mark.parametrize("mesh, microbatches, chunks", CASES, ids=str)
def test_updates_are_those_of_a_plain_loop(mesh, microbatches, chunks):
    data, passes = pairs(), {"chunk_loss": {"chunks": chunks}}
    metrics, state = train_plainly(llama(2), plain_dpo, data, ADAMW)
    step = compile_lockstep(llama(2, attention="documents"), loss_of, data[0], mesh, microbatches=microbatches, passes=passes)
    assert in_chunks(step) == (chunks > 1)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
        assert result["reward_margin"] == pytest.approx(result["reward_chosen"] - result["reward_rejected"])
    assert_same(step.state_dict(), state, EXACT)


ONE_OF_EACH = [({}, 1, 1), ({"dp_shard": 2, "cp": 2}, 2, 1), ({"pp": 2, "dp_shard": 2}, 2, 1), ({"tp": 2}, 3, 5)]


@pytest.mark.sweep(10)
@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh, microbatches, chunks", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_trains_as_its_formula(name, mesh, microbatches, chunks):
    def loss(model, batch):
        return preference_loss(plain_logits, cfg, model, batch)

    cfg, passes = FORMULAS[name][1], {"chunk_loss": {"chunks": chunks}}
    data = [batch if cfg.has_reference else without_reference(batch) for batch in pairs(cfg.answers)]
    metrics, state = train_plainly(llama(2), lambda *args: plainly(name, microbatches, *args), data, ADAMW)
    step = compile_lockstep(llama(2, attention="documents"), loss, data[0], mesh, microbatches=microbatches, passes=passes)
    assert in_chunks(step) == (chunks > 1)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
    assert_same(step.state_dict(), state, EXACT)


def test_odds_are_finite_even_of_an_answer_that_is_certain():
    logs = torch.tensor([0.0, -1e-9, -0.7, -90.0], requires_grad=True)
    odds = log_odds(logs)
    odds.sum().backward()
    assert odds.isfinite().all() and logs.grad.isfinite().all()
    assert odds[2:].tolist() == pytest.approx([math.log(math.exp(x) / (1 - math.exp(x))) for x in (-0.7, -90.0)])


def judged(seed=3):
    """Return batches of single answers, each with an unrelated one, except the first; half of them are desirable."""
    for batch in pairs(2, seed=seed):
        known = dict(zip(ANSWER_REFERENCE, (batch.pop(name) for name in REFERENCE[:2])))
        known["reference_unrelated"] = 20 * known["reference_unrelated"]  # so that the reference point is above 0
        batch["labels"][0][batch["documents"][0] == 1] = -100
        yield batch | known | {"desirable": (torch.arange(len(batch["tokens"])) % 2).float()}


def plain_judged(weights, microbatches, model, batch, beta=0.3):
    """Return section 4 of arXiv:2402.01306, answer by answer, as TRL 1.16 has it (`KTOTrainer._compute_loss`)."""
    scores = by_hand(model, batch)[:, :2] - torch.stack([batch[name] for name in ANSWER_REFERENCE], 1)
    counts = [[int((labels[documents == i] != -100).sum()) for i in (0, 1, 1)] for labels, documents in zip(batch["labels"], batch["documents"])]
    losses = []
    for row in batch["pairs"].nonzero().flatten().tolist():
        point = reference_point(scores[:, [0, 0, 1]], counts, row, len(counts) // microbatches)
        sign, weight = (1, weights[0]) if batch["desirable"][row] else (-1, weights[1])
        losses.append(weight * (1 - logistic(sign * beta * (scores[row, 0] - point))))
    return sum(losses) / len(losses)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh, microbatches, chunks", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 1.3)])
def test_single_answers_train_as_the_formula_of_kto(weights, mesh, microbatches, chunks):
    cfg, data = KtoConfig("kto", beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1]), list(judged())
    metrics, state = train_plainly(llama(2), lambda *args: plain_judged(weights, microbatches, *args), data, ADAMW)
    loss, passes = partial(judged_loss, plain_logits, cfg), {"chunk_loss": {"chunks": chunks}}
    step = compile_lockstep(llama(2, attention="documents"), loss, data[0], mesh, microbatches=microbatches, passes=passes)
    assert in_chunks(step) == (chunks > 1)
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
    assert metrics[0]["loss"] != pytest.approx(plain_judged(weights, 6, llama(2), data[0]).item())  # the point matters
    assert_same(step.state_dict(), state, EXACT)


def without_reference(batch):
    return {name: value for name, value in batch.items() if name not in REFERENCE}


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"cp": 2}, {"tp": 2}], ids=str)
def test_losses_in_chunks_are_those_of_whole_logits(mesh):
    data, model = pairs(), llama(2, attention="documents")
    steps = [compile_lockstep(model, loss_of, data[0], mesh, passes={"chunk_loss": {"chunks": n}}) for n in (1, 4)]
    whole, chunked = [(train_step(step, data), step.state_dict()) for step in steps]
    for result, expected in zip(chunked[0], whole[0], strict=True):
        assert_same(result, expected, EXACT)
    assert_same(chunked[1], whole[1], EXACT)


@pytest.mark.full
@pytest.mark.parametrize("mesh, microbatches, chunks", CASES, ids=str)
def test_a_reference_is_told_row_by_row(mesh, microbatches, chunks):
    model, (batch, *_) = llama(2, attention="documents"), pairs(3)
    inputs = {name: value for name, value in batch.items() if name not in ("pairs", *REFERENCE)}

    def loss(model, batch):
        return reference(plain_logits, REFERENCE, model, batch)

    how = {"mesh": mesh, "ranks": "lockstep", "microbatches": microbatches, "passes": {"chunk_loss": {"chunks": chunks}}}
    step = ct.compile_step(model, loss, inputs, train=False, **how)
    result = step.rows(inputs)
    assert in_chunks(step) == (chunks > 1)
    expected = by_hand(llama(2), batch).detach()
    assert_same(result, {name: expected[:, i] for i, name in enumerate(REFERENCE)}, EXACT)
    with pytest.raises(UserError, match="as the metric 'reference_chosen'; it must be a scalar"):
        ct.compile_step(model, loss, inputs, **how)


@pytest.mark.full
def test_a_reference_needs_less_memory_than_a_step_that_keeps_least():
    (batch, *_), model, passes = pairs(), llama(2, attention="documents"), {"remat": {"policy": "full"}}
    inputs = {name: value for name, value in batch.items() if name not in ("pairs", *REFERENCE)}
    step = compile_lockstep(model, loss_of, batch, {"dp_shard": 2}, {"name": "sgd", "max_norm": None}, passes=passes)
    referring = ct.compile_step(
        model, lambda *args: reference(plain_logits, REFERENCE[:2], *args), inputs, train=False, mesh={"dp_shard": 2}, ranks="lockstep", passes=passes
    )
    peaks = [[p["accounting"]["peak_bytes"] for p in result.report["passes"]][-1] for result in (step, referring)]
    assert peaks[1] < peaks[0]


# ---- from a file to a run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write pairs whose rejected answers are all equal, and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder)
    lines = [{"prompt": f"{i}?", "chosen": f"{i + 1}.", "rejected": "never"} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trainer(folder, where, **options):
    """Return a DPO run on a small decoder."""
    data = {"name": "text", "files": [str(folder / "pairs.jsonl")], "tokenizer": str(folder / "tokenizer.json"), "chat": True}
    defaults = {
        "model": {"n_layers": 1, "dim": 32, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32, "vocab_size": 259, "attention": "documents"},
        "data": data | {"pairs": True, "eval_fraction": 0.2},
        "train": {"steps": 6, "seq_len": 96, "global_batch_size": 4},
        "optim": {"lr": 3e-3},
        "loss": "dpo",
        "lower": {"backend": "eager"},
        "run": {"dir": str(where), "dump_graphs": False},
    }
    return ct.Trainer(**{name: {**defaults.get(name, {}), **value} if isinstance(value, dict) else value for name, value in (defaults | options).items()})


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_run_begins_at_its_reference_and_learns_the_preference(folder, tmp_path):
    trainer(folder, tmp_path / "whole", eval={"interval": 3}).train()
    first, *_, last = records(tmp_path / "whole")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and abs(first["reward_margin"]) < 1e-4
    assert last["loss"] < 0.5 and last["reward_margin"] > 0.4 and last["reward_accuracy"] == 1
    assert last["eval_loss"] < 0.6 and last["eval_reward_accuracy"] == 1

    part = {"steps": 3, "seq_len": 96, "global_batch_size": 4}
    options = {"eval": {"interval": 3}, "lr_schedule": "constant", "run": {"dir": str(tmp_path / "parts"), "dump_graphs": False}}
    trainer(folder, "", train=part, **options).train()
    content = (tmp_path / "parts" / FILE).read_bytes()
    (tmp_path / "parts" / FILE).write_bytes(content[:500] + b"?" + content[501:])  # damaged, so computed again from the initial weights
    trainer(folder, "", checkpoint={"resume": "latest"}, **options).train()
    trainer(folder, "", **options | {"run": {"dir": str(tmp_path / "undisturbed"), "dump_graphs": False}}).train()
    with np.load(tmp_path / "parts" / FILE) as second, np.load(tmp_path / "undisturbed" / FILE) as expected:
        assert all(np.array_equal(second[name], expected[name]) for name in expected.files)
    losses = [[record["loss"] for record in records(tmp_path / name)] for name in ("parts", "undisturbed")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


STARTS = {"ipo": 25.0, "kto": 0.5, "simpo": None, "orpo": None, "cpo": None}  # the first loss, of a model that is its reference


@pytest.mark.full
@pytest.mark.parametrize("name", STARTS)
def test_a_run_computes_a_reference_if_the_loss_needs_one(name, folder, tmp_path):
    trainer(folder, tmp_path / "run", loss=name, eval={"interval": 3}, train={"steps": 3, "seq_len": 96, "global_batch_size": 4}).train()
    first, *_, last = records(tmp_path / "run")
    assert last["reward_margin"] > first["reward_margin"] and math.isfinite(last["eval_loss"])
    assert (tmp_path / "run" / FILE).exists() == (STARTS[name] is not None)
    if STARTS[name] is not None:
        assert first["loss"] == pytest.approx(STARTS[name], abs=1e-4)
        with np.load(tmp_path / "run" / FILE) as stored:
            assert {stored[name].shape[1] for name in stored.files if name != "of"} == {2 if name == "ipo" else 3}


def answers(folder):
    """Write single answers, of which those that end with a full stop are desirable; return the options of their data."""
    rows = [{"prompt": f"{i}?", "completion": f"{i + 1}." if i % 2 else "never", "label": bool(i % 2)} for i in range(40)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"files": [str(folder / "answers.jsonl")], "pairs": False, "records": "answers"}


@pytest.mark.full
def test_a_run_on_single_answers_raises_the_desirable_ones(folder, tmp_path):
    data = answers(folder)
    trainer(folder, tmp_path / "run", loss="kto", data=data, eval={"interval": 3}).train()
    first, *_, last = records(tmp_path / "run")
    assert first["loss"] == pytest.approx(0.5, abs=1e-5) and abs(first["reward_margin"]) < 1e-4
    assert last["loss"] < first["loss"] and last["eval_reward_margin"] > 0.05 and last["eval_reward_accuracy"] > 0.7
    with np.load(tmp_path / "run" / FILE) as stored:
        assert {stored[name].shape[1] for name in stored.files if name != "of"} == {2}


def test_answers_need_a_label_and_a_loss_that_takes_them(folder, tmp_path):
    data = answers(folder)
    for options, message in (
        ({"loss": "dpo"}, "data.records: answers with loss=dpo, which needs documents"),
        ({"data": data | {"pairs": True}}, "data.records: answers with data.pairs=true"),
        ({"data": data | {"chat": False}}, "data.records: answers are those of conversations; set data.chat=true"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(folder, tmp_path / "run", **{"loss": "kto", "data": data} | options).train()
    with pytest.raises(UserError, match="loss.nll_weight: 0.1 with data.records=answers"):
        validate(to_config(compose(["recipe=kto", "model.path=a", "data=text", "data.files=[a]", "loss.nll_weight=0.1"])), 1)
    for row, message in (
        ({"prompt": "a", "completion": "b"}, 'has no "label", which judged answers need'),
        ({"prompt": "a", "completion": "b", "label": "good"}, 'field "label" is \'good\', neither true nor false'),
    ):
        (folder / "bad.jsonl").write_text(json.dumps(row))
        with pytest.raises(UserError, match=message):
            trainer(folder, tmp_path / "run", loss="kto", data=data | {"files": [str(folder / "bad.jsonl")]}).train()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"data": {"pairs": False}}, r"loss.name: dpo compares two answers; set data.pairs=true"),
        ({"data": {"pairs": False}, "loss": "orpo"}, r"loss.name: orpo compares two answers; set data.pairs=true"),
        ({"loss": "cross_entropy"}, r"data.pairs: need a loss that compares two answers"),
        ({"data": {"chat": False}}, r"data.pairs: are conversations; set data.chat=true"),
        ({"data": {"packing": "cut"}}, r"data.packing: cut with data.pairs, and each pair is one sequence"),
        ({"model": {"attention": "causal"}}, r"model.attention: causal with data.pairs: both answers share a sequence"),
        (
            {"model": {"name": "moe_debug", "attention": "documents", "experts": {"count": 4, "top_k": 1, "width": 8, "balance_loss": 0.1}}},
            r"model.experts.balance_loss: 0.1 is not part of loss=dpo",
        ),
        ({"train": {"seq_len": 50}}, r"data.pairs: \d+ of \d+ pairs are longer than rows of 50 tokens, the longest has \d+"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(options, message, folder, tmp_path):
    with pytest.raises(UserError, match=message):
        trainer(folder, tmp_path / "run", **options).train()


@pytest.mark.parametrize(
    "options, message",
    [
        (["loss=simpo", "+loss.label_smoothing=0.1"], "loss.label_smoothing: no such option; there are name, beta, nll_weight, gamma"),
        (["+loss.name=kto2"], "loss.name: 'kto2' is not one of dpo, ipo, simpo, orpo, cpo, kto, grpo, gkd, distill, reward, classify, embed; did you mean 'kto'?"),
        (["loss=ppo"], "loss: 'ppo' is not one of .*; there is no PPO with a value model"),
        (["+train.cpo_alpha=1"], "train.cpo_alpha: no such option; the weight .* is loss.nll_weight"),
    ],
    ids=["option", "name", "choice", "foreign"],
)
def test_an_unknown_loss_or_option_of_it_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        to_config(compose(options))


def test_a_reward_model_of_ones_own_ranks_pairs(folder, tmp_path):
    class Reward(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.score = torch.nn.Embedding(259, 16), torch.nn.Linear(16, 1)

        def forward(self, tokens):
            return self.score(self.embed(tokens))[..., 0]

    def ranking(model, batch):
        answered = batch["labels"] != -100
        scores = model(batch["tokens"]) * answered
        chosen, rejected = ((scores * (batch["documents"] == i)).sum(1) for i in (0, 1))
        return -F.logsigmoid(chosen - rejected).mean(), {"accuracy": (chosen > rejected).float().mean()}

    trainer(folder, tmp_path / "run", model=Reward(), loss=ranking, train={"steps": 20, "seq_len": 96, "global_batch_size": 4}, optim={"lr": 1e-2}).train()
    result = records(tmp_path / "run")
    assert result[-1]["loss"] < 0.1 < 0.3 < result[0]["loss"] and result[-1]["accuracy"] == 1
    assert not (tmp_path / "run" / FILE).exists()
