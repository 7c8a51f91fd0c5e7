"""Muon on shards equals Muon on one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import EXACT, SEQ_LEN, VOCAB, assert_same, batches, compile_lockstep, llama, llama_loss
from torch import Tensor, nn

from compiler_trainer import UserError
from compiler_trainer.capture.capture import capture
from compiler_trainer.config.schema import ExpertsConfig
from compiler_trainer.step.effects import effect_lines
from passes.rules.roles import matrices
from passes.update.muon import orthogonal

LRS = (1e-2, 3e-2, 2e-2, 1e-2, 3e-2)
MUON = {"name": "muon", "momentum": 0.9, "betas": (0.8, 0.9), "weight_decay": 0.1, "max_norm": 0.5}
MESHES = [{}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}, {"tp": 3}, {"dp_shard": 8}]


class PlainMuon:
    """The update of a weight as in the paper, with singular values from five steps in fp64.

    `matrices` returns the weight's matrices, of whatever tensor has its shape.
    """

    def __init__(self, weight: Tensor, matrices=lambda weight: [weight]):
        self.weight, self.momentum = weight, torch.zeros_like(weight)
        self.places = matrices(torch.arange(weight.numel()).view(weight.shape))

    def step(self, gradient: Tensor, lr: float) -> None:
        self.momentum.lerp_(gradient, 0.1)
        update = gradient.lerp(self.momentum, 0.9).flatten()
        direction = torch.full_like(update, float("nan"))
        for place in self.places:
            direction[place] = made_orthogonal(update[place])
        self.weight.mul_(1 - lr * 0.1).sub_(lr * direction.view(self.weight.shape))


def made_orthogonal(matrix: Tensor) -> Tensor:
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return 0.2 * max(matrix.shape) ** 0.5 * (wide.T if matrix.shape[0] > matrix.shape[1] else wide)


def plainly(model: nn.Module, data, matrices, loss_fn=llama_loss) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final state of one device, with the matrices of each weight that Muon takes, by name."""
    model = copy.deepcopy(model)
    by_muon = {n: PlainMuon(p.data, matrices[n]) for n, p in model.named_parameters() if n in matrices}
    assert by_muon.keys() == matrices.keys()
    adamw = torch.optim.AdamW([p for n, p in model.named_parameters() if n not in by_muon], betas=(0.8, 0.9), weight_decay=0.1)
    losses = []
    for batch, lr in zip(data, LRS, strict=True):
        model.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        for name, parameter in model.named_parameters():
            if name in by_muon:
                by_muon[name].step(parameter.grad, lr)
        losses.append(loss.item())
    return losses, model.state_dict()


def whole(weight: Tensor) -> list[Tensor]:
    return [weight]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(1)
def test_five_steps_are_those_of_one_device(mesh):
    model, data = llama(2), batches(len(LRS), rows=8)
    layer = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    losses, state = plainly(model, data, {f"layers.{i}.{name}.weight": whole for i in range(2) for name in layer})
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


class Mixed(nn.Module):
    """Weights of all kinds: fused ones, kernels, a stack, a table, a norm and decays of several dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(VOCAB, 8), nn.Parameter(torch.randn(1, SEQ_LEN, 8))
        self.qkv, self.by_head, self.gates, self.alternating = (nn.Linear(8, n, bias=False) for n in (16, 24, 20, 20))
        self.columns, self.down = nn.Parameter(torch.randn(8, 20)), nn.Linear(10, 8)
        self.rotated, self.stack = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 8, 8))
        self.mix, self.filter = nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.decay, self.norm, self.head = nn.Parameter(torch.rand(1, 1, 8)), nn.LayerNorm(8), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = self.norm(self.table(tokens) + self.places)
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        q, k, v = (y.view(rows, length, -1, 4).transpose(1, 2) for y in (q, k, v))
        x = x + F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        q, k, v = self.by_head(x).view(rows, length, 2, 12).transpose(1, 2).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for y in (self.gates(x), x @ self.columns):
            gate, up = y.chunk(2, -1)
            x = x + self.down(F.silu(gate) * up)
        y = self.alternating(x)
        x = x + self.down(F.silu(y[..., ::2]) * y[..., 1::2])
        a, b = self.rotated(x).view(rows, length, 2, 4).chunk(2, -1)
        first, second = b.chunk(2, -1)
        x = x + torch.cat([a, torch.cat([-second, first], -1)], -1).flatten(2) * self.decay
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2) + self.filter(x.transpose(1, 2)).transpose(1, 2)
        for matrix in self.stack:
            x = x + (x @ matrix).tanh()
        return self.head(x)


def mixed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


MATRICES = {
    "qkv.weight": lambda w: [w[:8], w[8:12], w[12:]],
    "by_head.weight": lambda w: [w.view(2, 3, 4, 8)[:, part].reshape(8, 8) for part in range(3)],
    "gates.weight": lambda w: [w[:10], w[10:]],
    "alternating.weight": lambda w: [w[::2], w[1::2]],
    "columns": lambda w: [w[:, :10], w[:, 10:]],
    "down.weight": whole,
    "rotated.weight": whole,  # its halves are joined again
    "stack": list,
    "mix.weight": lambda w: [w.flatten(1)],
}


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2}, {"tp": 2}, {}], ids=str)
def test_weights_of_several_matrices_are_those_of_one_device(mesh):
    model, data = Mixed().double(), [{k: b[k] for k in ("tokens", "labels")} for b in batches(len(LRS), rows=4)]
    losses, state = plainly(model, data, MATRICES, mixed_loss)
    step = compile_lockstep(model, mixed_loss, data[0], mesh, MUON)
    assert [step(batch, lr)["loss"] for batch, lr in zip(data, LRS, strict=True)] == pytest.approx(losses, abs=EXACT)
    assert_same(step.state_dict(), state, EXACT)
    (line,) = (line for line in effect_lines(step.report) if line.startswith("optim.name"))
    assert line == (
        "optim.name: 9 of 21 parameters by Muon; 5 of several matrices (columns as 2 matrices); "
        "AdamW: 2 other (places), 1 embedding (table.weight), 7 vector (down.bias), 1 convolution (filter.weight), 1 head (head.weight)"
    )


def test_muon_takes_what_a_group_states_if_a_matmul_reads_it():
    stated = {"groups": {"mine": {"names": ["output.weight"], "optimizer": "muon"}}}
    step = compile_lockstep(llama(), llama_loss, batches()[0], {}, MUON | stated)
    assert "8 of 12 parameters by Muon" in str(effect_lines(step.report))
    for name, kind in (("tok_embeddings.weight", "embedding"), ("norm.weight", "vector")):
        groups = {"mine": {"names": [name], "optimizer": "muon"}}
        problem = rf"optim.groups.mine.optimizer: muon, but {name} \[.*\] is no matrix of a matmul \({kind}\); set it to adamw"
        with pytest.raises(UserError, match=problem):
            compile_lockstep(llama(), llama_loss, batches()[0], {}, MUON | {"groups": groups})


def test_muon_without_a_matrix_is_refused():
    table = nn.Sequential(nn.Embedding(VOCAB, 8)).double()
    with pytest.raises(UserError, match="optim.name: muon has no effect: no parameter is a matrix of a matmul"):
        compile_lockstep(table, lambda model, batch: model(batch["tokens"]).square().mean(), batches()[0], {}, MUON)


def test_routers_are_left_to_adamw():
    experts = ExpertsConfig(count=4, top_k=2, width=6)
    step = compile_lockstep(llama(experts=experts), llama_loss, batches()[0], {}, MUON)
    assert "1 router (layers.0.feed_forward.router.weight)" in str(effect_lines(step.report))


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}], ids=str)
@pytest.mark.full
def test_experts_are_stacks_of_matrices_wherever_they_lie(mesh):
    experts = ExpertsConfig(count=4, top_k=2, width=6)
    model, data = llama(2, experts=experts), batches(len(LRS), rows=8)
    alone, spread = (compile_lockstep(model, llama_loss, data[0], sizes, MUON) for sizes in ({}, mesh))
    for batch, lr in zip(data, LRS, strict=True):
        assert spread(batch, lr)["loss"] == pytest.approx(alone(batch, lr)["loss"], abs=EXACT)
    assert_same(spread.state_dict(), alone.state_dict(), 1e-9)


class Gated(nn.Module):
    """Heads of which each is scaled by a gate of its own, as in dots3."""

    def __init__(self):
        super().__init__()
        self.heads, self.gates, self.down = nn.Linear(8, 32), nn.Linear(8, 4), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.heads(x).unflatten(-1, (4, 8)) * self.gates(x).unsqueeze(-1).sigmoid()).flatten(-2))


def test_a_gate_of_heads_is_one_matrix():
    program, _ = capture(Gated(), lambda model, batch: model(batch["x"]).square().mean(), {"x": torch.randn(3, 8)}, torch.device("cpu"))
    assert not matrices(program)
