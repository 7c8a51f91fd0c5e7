"""Run folders for tests of code that reads them: a small model compiled for all ranks in this process, and metrics."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compiler_trainer as ct
from compiler_trainer.config import schema as config
from compiler_trainer.config.schema import Config, MeshConfig
from passes.check.runner import Dumper

VOCAB = 11
PLAN = {"up.weight": {"tp": 0}, "gate.weight": {"tp": 0}, "down.weight": {"tp": 1}}


class Gated(nn.Module):
    """A norm, a gated product of two projections and one back: a small version of what tensor parallelism shards."""

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
    """Return the mean squared distance from the expected values."""
    return (model(batch["tokens"]) - batch["wanted"]).square().mean()


def case() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and a batch of three sequences, in fp64."""
    torch.manual_seed(0)
    model = Gated().double()
    return model, {"tokens": torch.randint(0, VOCAB, (3, 4)), "wanted": torch.randn(3, 4, 6, dtype=torch.float64)}


@functools.cache
def run_folder(tp: int = 2, momentum: float = 0.0, param_dtype: str | None = None, seed: int = 0,
               max_norm: float | None = None) -> Path:
    """Return a run of two data ranks and `tp` tensor ranks, with two steps of metrics; shared between tests."""
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    mesh = {"dp_shard": 2, "tp": tp}
    passes: dict[str, Any] = {"shard": {"plan": PLAN if tp > 1 else None}, "cast": {"param_dtype": param_dtype}}
    model, batch = case()
    step = ct.compile_step(
        model, loss_fn, batch, mesh=mesh, passes=passes, optim={"name": "sgd", "momentum": momentum, "lr": 0.1, "max_norm": max_norm},
        ranks="lockstep", observe=Dumper(folder / "graphs"),
    )
    config.save(dataclasses.replace(Config(), mesh=MeshConfig(**mesh)), folder / "config.yaml")
    (folder / "report.json").write_text(json.dumps(step.report))
    lines = [json.dumps({"step": i, **step(batch, 0.1 + seed * (i - 1))}) for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder
