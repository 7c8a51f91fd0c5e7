"""Muon on shards equals Muon on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import EXACT, assert_same, batches, compile_lockstep, llama, llama_loss
from torch import Tensor, nn

from compiler_trainer import UserError
from compiler_trainer.config.schema import ExpertsConfig
from passes.update.muon import orthogonal

LRS = (1e-2, 3e-2, 2e-2, 1e-2, 3e-2)
OTHERS = {"others": {"kinds": ["vector", "embedding", "head"], "optimizer": "adamw", "lr": 0.5}}
MUON = {"name": "muon", "momentum": 0.9, "betas": (0.8, 0.9), "weight_decay": 0.1, "max_norm": 0.5, "groups": OTHERS}
MESHES = [{}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}, {"tp": 3}, {"dp_shard": 8}]


class PlainMuon:
    """The update of one matrix as in the paper, with singular values from five steps in fp64."""

    def __init__(self, weight: Tensor):
        self.weight, self.momentum = weight, torch.zeros_like(weight)

    def step(self, gradient: Tensor, lr: float) -> None:
        self.momentum.lerp_(gradient, 0.1)
        update = gradient.lerp(self.momentum, 0.9)
        wide = update.T if update.shape[0] > update.shape[1] else update
        wide = wide / wide.norm()
        for _ in range(5):
            gram = wide @ wide.T
            wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
        update = wide.T if update.shape[0] > update.shape[1] else wide
        self.weight.mul_(1 - lr * 0.1).sub_(lr * 0.2 * max(update.shape) ** 0.5 * update)


def plainly(model: nn.Module, data) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final state of one device."""
    model = copy.deepcopy(model)
    by_muon = {n: PlainMuon(p.data) for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n and n != "output.weight"}
    assert len(by_muon) == 7 * 2
    adamw = torch.optim.AdamW([p for n, p in model.named_parameters() if n not in by_muon], betas=(0.8, 0.9), weight_decay=0.1)
    losses = []
    for batch, lr in zip(data, LRS, strict=True):
        model.zero_grad()
        loss = llama_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = lr / 2
        adamw.step()
        for name, parameter in model.named_parameters():
            if name in by_muon:
                by_muon[name].step(parameter.grad, lr)
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(1)
def test_five_steps_are_those_of_one_device(mesh):
    model, data = llama(2), batches(len(LRS), rows=8)
    losses, state = plainly(model, data)
    step = compile_lockstep(model, llama_loss, data[0], mesh, MUON)
    assert [step(batch, lr)["loss"] for batch, lr in zip(data, LRS, strict=True)] == pytest.approx(losses, abs=EXACT)
    assert_same(step.state_dict(), state, EXACT)


def test_one_matrix_of_torch_s_own():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 9))
    weight.grad = torch.randn(6, 9)
    before = weight.detach().clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.9, adjust_lr_fn="match_rms_adamw").step()
    direction = weight.grad.lerp(weight.grad * 0.1, 0.9)
    torch.testing.assert_close(before - weight.detach(), orthogonal(direction), atol=1e-2, rtol=2e-2)  # theirs is in bf16


def test_what_is_no_matrix_is_refused_by_name():
    with pytest.raises(UserError, match=r"optim.groups: layers.0.\S* has shape \[\d+\], but Muon takes matrices"):
        compile_lockstep(llama(), llama_loss, batches()[0], {}, MUON | {"groups": {}})


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}], ids=str)
@pytest.mark.full
def test_experts_are_stacks_of_matrices_wherever_they_lie(mesh):
    experts = ExpertsConfig(count=4, top_k=2, width=6)
    model, data = llama(2, experts=experts), batches(len(LRS), rows=8)
    alone, spread = (compile_lockstep(model, llama_loss, data[0], sizes, MUON) for sizes in ({}, mesh))
    for batch, lr in zip(data, LRS, strict=True):
        assert spread(batch, lr)["loss"] == pytest.approx(alone(batch, lr)["loss"], abs=EXACT)
    assert_same(spread.state_dict(), alone.state_dict(), 1e-9)
