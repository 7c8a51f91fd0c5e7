"""Run folders of a small net on four ranks, and a timeline, for tests of the tools that show them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from torch import nn

import compiler_trainer as ct
from passes.check.runner import Dumper

MESH = {"dp_shard": 2, "tp": 2}
# compute 0-2, waits for 0 until 3, computes 3-4, waits for 1 until 7 (2 ends within that), computes 7-10
EVENTS = [
    {"node": "", "stream": "compute", "start_ms": 0.0, "end_ms": 2.0},
    {"node": "0", "stream": "tp", "start_ms": 0.5, "end_ms": 3.0},
    {"node": "", "stream": "compute", "start_ms": 3.0, "end_ms": 4.0},
    {"node": "1", "stream": "tp", "start_ms": 3.0, "end_ms": 7.0},
    {"node": "2", "stream": "dp_shard", "start_ms": 1.0, "end_ms": 2.0},
    {"node": "", "stream": "compute", "start_ms": 7.0, "end_ms": 10.0},
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 30, bias=False), nn.Linear(30, 12, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    return model(batch["x"]).square().mean()


def write_run(folder: Path, **passes) -> Path:
    """Write the run folder of a small net on four ranks, all in this process."""
    torch.manual_seed(0)
    plan = {"layers.*.up.weight": {"tp": 0}, "layers.*.down.weight": {"tp": 1}}
    step = ct.compile_step(Net(), loss, {"x": torch.randn(6, 5, 12)}, mesh=MESH, ranks="lockstep", optim={"name": "adamw"},
                           passes={"shard": {"plan": plan}, **passes}, observe=Dumper(folder / "graphs"))
    (folder / "report.json").write_text(json.dumps(step.report))
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"name": "net"}, "mesh": MESH}))
    return folder
