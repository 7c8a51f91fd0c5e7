"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, LrScheduleConfig
from compiler_trainer.config.targets import function


def rates(cfg: Config) -> Callable[[int], float]:
    """Return the learning rate as a function of the update's number, from 1.

    The function raises UserError if a user's schedule returns no finite number, or a negative one.
    """
    schedule, base, steps = cfg.lr_schedule, cfg.optim.lr, cfg.train.steps
    if schedule._target_ is None:
        return lambda step: learning_rate(schedule, base, step, steps)
    share = function({"_target_": schedule._target_, **schedule.arguments}, "lr_schedule")

    def rate(step: int) -> float:
        factor = share(step, steps)
        if not isinstance(factor, int | float) or not (math.isfinite(factor) and factor >= 0):
            problem = f"{schedule._target_}({step}, {steps}) is {factor!r}"
            raise UserError(
                "lr_schedule._target_",
                f"{problem}; it must be a finite number, 0 or more, by which optim.lr is multiplied",
            )
        return base * factor

    return rate


def learning_rate(cfg: LrScheduleConfig, base_lr: float, step: int, steps: int) -> float:
    """Return the rate of update `step` of `steps`, counted from 1.

    It is `base_lr` at the end of the warm-up and lowest at the last update. The decay would end one update after the
    last, because an update at a rate of 0 trains nothing.
    """
    warmup, decay = cfg.warmup(steps), cfg.decay(steps)
    if step < warmup:
        return base_lr * step / warmup
    top = max(1, warmup if decay is None else steps - decay)
    part = max(0, step - top) / (steps + 1 - top)
    return base_lr * (cfg.min_ratio + (1 - cfg.min_ratio) * remaining(cfg.name, part))


def remaining(name: str, part: float) -> float:
    """Return the remaining part of the decay, from 1 to 0, when its part `part` is over."""
    shares = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "wsd": 1 - part**0.5}
    return shares[name]
