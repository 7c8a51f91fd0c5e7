"""Runs of a few steps, most of them with a step that is not compiled."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from compiler_trainer.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LowerConfig,
    LrScheduleConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from compiler_trainer.step.results import Results
from compiler_trainer.step.runtime import LockstepRanks
from compiler_trainer.step.step import State
from compiler_trainer.training.anomalies import RANKS
from compiler_trainer.training.metrics import read
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=24)
TIMES = ("tokens_per_s", "images_per_s", "step_ms", "tflops", "data_ms", "peak_mem_bytes", *RANKS)


def options(folder, steps=6, **changes):
    """Return a tiny run into `folder`, evaluated every 4 steps, with a checkpoint every 2."""
    return replace(
        Config(
            model=MODEL,
            data=DataConfig(name="synthetic", documents=40),
            train=TrainConfig(steps=steps, seq_len=16, global_batch_size=4),
            optim=OptimConfig(lr=1e-2, max_norm=1.0),
            lr_schedule=LrScheduleConfig("cosine", warmup_steps=2, min_ratio=0.1),
            lower=LowerConfig("eager"),
            checkpoint=CheckpointConfig(interval=2, keep=9),
            eval=EvalConfig(interval=4, batches=2),
            run=RunConfig(dir=str(folder)),
        ),
        **changes,
    )


def resuming(cfg, resume):
    return replace(cfg, checkpoint=replace(cfg.checkpoint, resume=str(resume)))


class FakeStep:
    """One weight, moved by each batch; its loss depends on the weight and on the batch."""

    def __init__(self, *args, **kwargs):
        self.mesh, self.ranks, self.device, self.report = Mesh.of({}), (0,), torch.device("cpu"), {"seconds": {}, "remarks": [], "passes": []}
        self.state = {"model.w": State(Spec.whole((3,)), {0: torch.ones(3)}, torch.ones(3))}
        self.rows = len(args[2]["tokens"])

    def samples_read(self, ranks):
        return torch.arange(self.rows)

    def total(self, values):
        return values.sum()

    def tensors(self):
        return {name: (state.spec, state.local) for name, state in self.state.items()}

    def balance(self):
        return {}

    metrics, schedule, runtime, train, training = (), None, LockstepRanks(Mesh.of({})), {}, ((), None)

    def measure(self, batch):
        assert sorted(batch) == ["documents", "labels", "positions", "tokens"]
        return {"loss": float(batch["tokens"].float().mean() * self.state["model.w"].local[0].sum())}

    def weights(self, batch):
        return {}

    def launch(self, batch, lr):
        return Results({name: torch.tensor(value, dtype=torch.float64) for name, value in self(batch, lr).items()}, self.device)

    def __call__(self, batch, lr):
        loss = self.measure(batch)["loss"]
        self.state["model.w"].local[0].mul_(1 - lr * loss / 1000)
        return {"loss": loss, "grad_norm": abs(loss)}


def metrics(folder):
    return read(Path(folder, "metrics.jsonl"))


def timeless(records):
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


@contextmanager
def no_file_above(most_bytes):
    """Let every write fail that makes a file larger than `most_bytes`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
