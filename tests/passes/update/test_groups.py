"""Parameters of some kinds and names are updated differently from the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import EXACT, LRS, assert_same, batches, compile_lockstep, llama, llama_loss, train_step
from torch import nn

from compiler_trainer import UserError

PLAIN = {"name": "adamw", "betas": (0.8, 0.9), "weight_decay": 0.1, "max_norm": 0.5}


def trained(groups, overrides, **changes):
    """Return the state after three updates, and that of PyTorch with `groups` as its parameter groups."""
    model, data = llama(2, **changes), batches(rows=4)
    step = compile_lockstep(model, llama_loss, data[0], {"dp_shard": 2, "tp": 2}, PLAIN | {"groups": overrides})
    metrics = train_step(step, data)
    plain = copy.deepcopy(model)
    named = [[p for n, p in plain.named_parameters() if holds(n, p)] for holds, _, _ in groups]
    optimizer = torch.optim.AdamW([{"params": ps, "weight_decay": decay} for ps, (_, _, decay) in zip(named, groups)], betas=PLAIN["betas"])
    for batch, lr, result in zip(data, LRS, metrics, strict=True):
        optimizer.zero_grad()
        loss = llama_loss(plain, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), PLAIN["max_norm"])
        for group, (_, factor, _) in zip(optimizer.param_groups, groups):
            group["lr"] = lr * factor
        optimizer.step()
        assert result["loss"] == pytest.approx(loss.item(), abs=EXACT)
    return step.state_dict(), plain.state_dict()


def test_vectors_do_not_decay_and_what_is_looked_up_learns_slowly():
    groups = [(lambda n, p: p.dim() < 2, 1.0, 0.0), (lambda n, p: "embedding" in n, 0.1, 0.1), (lambda n, p: p.dim() == 2 and "embedding" not in n, 1.0, 0.1)]
    settings = {"plain": {"kinds": ["vector"], "weight_decay": 0.0}, "slow": {"kinds": ["embedding"], "lr": 0.1}}
    assert_same(*trained(groups, settings), EXACT)


@pytest.mark.full
def test_names_and_the_head_the_first_group_counts():
    second = lambda n, p: n.startswith("layers.1.")  # noqa: E731
    head = lambda n, p: n.startswith("output")  # noqa: E731
    groups = [(second, 0.5, 0.1), (head, 2.0, 0.3), (lambda n, p: not second(n, p) and not head(n, p), 1.0, 0.1)]
    settings = {"late": {"names": ["layers.1.*"], "lr": 0.5}, "head": {"kinds": ["head"], "names": ["layers.1.attention*"], "lr": 2.0, "weight_decay": 0.3}}
    assert_same(*trained(groups, settings), EXACT)


@pytest.mark.full
def test_a_head_that_is_the_embedding_is_both():
    tied = [(lambda n, p: "embedding" in n, 2.0, 0.1), (lambda n, p: "embedding" not in n, 1.0, 0.1)]
    assert_same(*trained(tied, {"head": {"kinds": ["head"], "lr": 2.0}}, tied=True), EXACT)


def test_a_pattern_that_names_nothing_is_refused():
    with pytest.raises(UserError, match=r"optim.groups.late.names: no trained parameter is named like 'layer.1"):
        compile_lockstep(llama(), llama_loss, batches()[0], {}, PLAIN | {"groups": {"late": {"names": ["layer.1.*"]}}})
