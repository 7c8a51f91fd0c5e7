"""One job: trained, or only compiled and predicted, on a mesh that may have to be found first."""

from __future__ import annotations

from compiler_trainer.config.schema import Config
from compiler_trainer.planning.auto import remark, settled
from compiler_trainer.planning.dry import dry_run
from compiler_trainer.training.trainer import train


def outcome(cfg: Config) -> float:
    """Train; the loss that it ends with. With `run.dry` compile only; the predicted milliseconds of a step."""
    cfg = settled(cfg)
    return dry_run(cfg)["predicted"]["step_ms"] if cfg.run.dry else train(cfg, remark)
