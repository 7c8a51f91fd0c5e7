"""GRPO's loss and gradients are those of TRL's formulas, in fp64, on any mesh."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle import ADAMW, EXACT, LRS, VOCAB, assert_same, compile_lockstep, llama, train_plainly, train_step

import compiler_trainer as ct
from compiler_trainer.config.schema import GrpoConfig
from compiler_trainer.models.grpo import answer_logs, grpo_loss
from compiler_trainer.models.subject import plain_logits

ROW, ROWS, ANSWER = 11, 6, 8


def rollouts(cfg, seed=3):
    """Return batches of answers of 1 to 8 tokens after prompts of 1 to 3; log-probabilities are near a model's."""
    draw = torch.Generator().manual_seed(seed)
    result = []
    for _ in LRS:
        tokens = torch.randint(0, VOCAB, (ROWS, ROW), generator=draw)
        labels, documents = torch.full_like(tokens, -100), torch.full_like(tokens, -1)
        for row in range(ROWS):
            prompt, answer = 1 + row % 3, int(torch.randint(1, ANSWER + 1, (), generator=draw))
            labels[row, prompt - 1 : prompt - 1 + answer] = torch.randint(0, VOCAB, (answer,), generator=draw)
            tokens[row, prompt : prompt - 1 + answer] = labels[row, prompt - 1 : prompt - 2 + answer]
            documents[row, : prompt - 1 + answer] = 0
        batch = {"tokens": tokens, "labels": labels, "positions": torch.arange(ROW).repeat(ROWS, 1), "documents": documents}
        logs = logs_of(llama(2), batch, cfg.temperature).detach()
        noise = {name: 0.5 * torch.randn(ROWS, ROW, generator=draw, dtype=torch.float64) for name in cfg.entries}
        near = {name: torch.where(labels != -100, logs + noise[name], 0.0) for name in cfg.entries}
        result.append(batch | near | {"advantages": torch.randn(ROWS, generator=draw, dtype=torch.float64)})
    return result


def logs_of(model, batch, temperature):
    """Return the log-probabilities of labels, as TRL's `selective_log_softmax` does; 0 without a label."""
    logits = model(batch["tokens"], batch["positions"]) / temperature
    logs = logits.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    return logs * (batch["labels"] != -100)


def trl(cfg, model, batch):
    """Return the loss of TRL 1.16, `GRPOTrainer._compute_loss`, with its importance weights of `token_truncate`.

    It is written as there; `loss_type` is grpo, dapo or dr_grpo, and the corrections for gradient accumulation are 1.
    """
    per_token_logps, mask = logs_of(model, batch, cfg.temperature), (batch["labels"] != -100).double()
    old_per_token_logps = batch.get("old", per_token_logps.detach())
    advantages = batch["advantages"].unsqueeze(1)
    log_ratio = per_token_logps - old_per_token_logps
    if cfg.importance == "token":
        log_importance_weights = log_ratio
    else:
        log_importance_weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    coef_1 = torch.exp(log_importance_weights)
    coef_2 = torch.clamp(coef_1, 1 - cfg.epsilon, 1 + (cfg.epsilon_high or cfg.epsilon))
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    if cfg.cap:
        per_token_loss = per_token_loss * torch.clamp(torch.exp(old_per_token_logps - batch["sampled"]), max=cfg.cap)
    if cfg.beta:
        ref_per_token_logps = batch["reference"]
        kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
        per_token_loss = per_token_loss + cfg.beta * kl
    if cfg.aggregation == "sequence":
        return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if cfg.aggregation == "token":
        return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
    return (per_token_loss * mask).sum() / (per_token_loss.size(0) * cfg.answer_tokens)


CASES = {
    "grpo": GrpoConfig("grpo", beta=0.04),
    "later steps": GrpoConfig("grpo", steps_per_rollout=2, beta=0.1, temperature=0.7),
    "dapo": GrpoConfig("grpo", steps_per_rollout=2, epsilon_high=0.28, aggregation="token"),
    "dr_grpo": GrpoConfig("grpo", steps_per_rollout=2, aggregation="constant", answer_tokens=ANSWER, scale_rewards=False, cap=None),
    "gspo": GrpoConfig("grpo", steps_per_rollout=2, importance="sequence", epsilon=3e-2, epsilon_high=4e-2),
    "gspo by token": GrpoConfig("grpo", steps_per_rollout=2, importance="sequence", aggregation="token", beta=0.1),
}
MESHES = [
    ({}, 1, 1),
    ({"dp_shard": 2}, 1, 1),
    ({"cp": 2}, 3, 1),
    ({"tp": 2}, 1, 4),
    ({"pp": 2, "dp_shard": 2}, 2, 1),
    ({"dp_shard": 2, "cp": 2}, 1, 3),
]


def in_chunks(step):
    """Return True if a step computes its loss in chunks."""
    return any(p["report"]["counts"].get("losses", 0) for p in step.report["passes"] if p["name"] == "chunk_loss")


@pytest.mark.sweep(12)
@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh, microbatches, chunks", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_the_formulas_of_trl(name, mesh, microbatches, chunks):
    cfg = CASES[name]
    data = rollouts(cfg)
    metrics, state = train_plainly(llama(2), partial(trl, cfg), data, ADAMW)
    loss, passes = partial(grpo_loss, plain_logits, cfg), {"chunk_loss": {"chunks": chunks}}
    step = compile_lockstep(llama(2, attention="documents"), loss, data[0], mesh, microbatches=microbatches, passes=passes)
    assert in_chunks(step) == (chunks > 1) and not step.report["remarks"]
    for result, expected in zip(train_step(step, data), metrics, strict=True):
        assert_same({name: result[name] for name in expected}, expected, EXACT)
    assert_same(step.state_dict(), state, EXACT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh, microbatches", [({}, 1), ({"cp": 2}, 2)], ids=str)
def test_metrics_are_means_of_the_tokens_of_answers(mesh, microbatches):
    cfg = GrpoConfig("grpo", steps_per_rollout=2, beta=0.1)
    batch = rollouts(cfg)[0]
    logs, answered = logs_of(llama(2), batch, 1.0).detach(), batch["labels"] != -100
    ratio, signs = (logs - batch["old"]).exp(), batch["advantages"].sign().unsqueeze(1)
    clipped = ((ratio < 0.8) & (signs < 0) | (ratio > 1.2) & (signs > 0))[answered].double()
    expected = {
        "gap": (batch["old"] - batch["sampled"]).abs()[answered].mean(),
        "clip_fraction": clipped.mean(),
        "kl": (torch.expm1(batch["reference"] - logs) - (batch["reference"] - logs))[answered].mean(),
    }
    assert 0.1 < expected["clip_fraction"] < 0.9
    step = compile_lockstep(llama(2, attention="documents"), partial(grpo_loss, plain_logits, cfg), batch, mesh, microbatches=microbatches)
    result = step(batch, 1e-3)
    assert_same({name: result[name] for name in expected}, {name: value.item() for name, value in expected.items()}, EXACT)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh, microbatches, chunks", MESHES, ids=str)
def test_log_probabilities_are_returned_token_by_token(mesh, microbatches, chunks):
    batch = {name: value for name, value in rollouts(GrpoConfig("grpo"))[0].items() if value.dtype == torch.int64}
    passes, loss = {"chunk_loss": {"chunks": chunks}}, partial(answer_logs, plain_logits, "old", 0.7)
    model, how = llama(2, attention="documents"), {"mesh": mesh, "ranks": "lockstep", "microbatches": microbatches}
    step = ct.compile_step(model, loss, batch, train=False, passes=passes, **how)
    assert_same(step.rows(batch), {"old": logs_of(llama(2), batch, 0.7).detach()}, EXACT)
