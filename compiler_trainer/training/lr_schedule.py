"""The learning rate of each step."""

from __future__ import annotations

import math

from compiler_trainer.config.schema import LrScheduleConfig


def learning_rate(cfg: LrScheduleConfig, base_lr: float, step: int, steps: int) -> float:
    """The rate of update `step` of `steps`, counted from 1: `base_lr` where the warm-up ends, its least at the last."""
    if step < cfg.warmup_steps:
        return base_lr * step / cfg.warmup_steps
    top = max(1, cfg.warmup_steps)
    done = (step - top) / max(1, steps - top)
    return base_lr * (cfg.min_ratio + (1 - cfg.min_ratio) * remaining(cfg.name, done))


def remaining(name: str, done: float) -> float:
    """What is left of the way down, from 1 to 0, when the part `done` of the decay is over."""
    if name == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - done if name == "linear" else 1.0
