"""Bisection: planted bugs are found to the exact node, and the script written of each shows it and goes quiet."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from compiler_trainer.config import OptimConfig, PassesConfig
from compiler_trainer.pipeline import build_pipeline
from passes import boundary, convert, ir
from passes import rules as table
from passes.partition import Builder
from tools.bisect import Finding, bisect
from tools.script import write

VOCAB = 11


class Gated(nn.Module):
    """A layer norm, a gated product of two projections and one back: what tensor parallelism shards, in little."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.norm = nn.RMSNorm(6)
        self.up, self.gate, self.down = nn.Linear(6, 5, False), nn.Linear(6, 5, False), nn.Linear(5, 6, False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        return x + self.down(torch.tanh(self.gate(y)) * self.up(y))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["tokens"]) - batch["wanted"]).square().mean()


PLAN = {"up.weight": {"tp": 0}, "gate.weight": {"tp": 0}, "down.weight": {"tp": 1}}


def case() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Gated().double()
    return model, {"tokens": torch.randint(0, VOCAB, (3, 4)), "wanted": torch.randn(3, 4, 6, dtype=torch.float64)}


def find(**options) -> Finding | None:
    model, batch = case()
    return bisect(model, loss_fn, batch, **options)


TP = {"mesh": {"tp": 2}, "passes": {"shard": {"plan": PLAN, "sequence_parallel": False}}}


def exit_code(finding: Finding, folder) -> int:
    path = folder / "repro.py"
    if not path.exists():
        write(finding.piece, path, "about")
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(path))
    return done.value.code


def test_x():
    pass
