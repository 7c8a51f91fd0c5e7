"""The learning rate of each step."""

from __future__ import annotations

import math

from compiler_trainer.config.schema import LrScheduleConfig


def learning_rate(cfg: LrScheduleConfig, base_lr: float, step: int, steps: int) -> float:
    """The rate of update `step` of `steps`, counted from 1: `base_lr` where the warm-up ends, its least at the last.

    The decay would be over with the update after the last: one at a rate of 0 would train nothing.
    """
    warmup, decay = cfg.warmup(steps), cfg.decay(steps)
    if step < warmup:
        return base_lr * step / warmup
    top = max(1, warmup if decay is None else steps - decay)
    done = max(0, step - top) / (steps + 1 - top)
    return base_lr * (cfg.min_ratio + (1 - cfg.min_ratio) * remaining(cfg.name, done))


def remaining(name: str, done: float) -> float:
    """What is left of the way down, from 1 to 0, when the part `done` of the decay is over."""
    left = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "wsd": 1 - done**0.5}
    return left[name]
