"""One job: trained, or only compiled and predicted, on a mesh that may have to be found first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config, is_open
from compiler_trainer.models.subject import Subject

if TYPE_CHECKING:
    from compiler_trainer.training.callbacks import Callback

GIB = 2**30
LARGE = 500_000_000  # parameters, from which on a mesh is worth a word


def outcome(cfg: Config) -> float:
    """Train, and leave the ranks; the loss that it ends with. See `on_ranks`."""
    from compiler_trainer.step.ranks import stop_ranks

    found = on_ranks(cfg)
    stop_ranks()  # not in a `finally`: a rank that fails must end at once, for the others wait for it
    return found


def on_ranks(cfg: Config, callbacks: Sequence[Callback] = ()) -> float:
    """Train; the loss that it ends with. With `run.dry` compile only; the predicted milliseconds of a step.

    Raises UserError where a dry run does not fit, its report written, with what does.
    """
    if is_open(cfg):
        from compiler_trainer.planning.auto import settled

        cfg = settled(cfg)
    if cfg.run.dry:
        return predicted(cfg)
    from compiler_trainer.training.trainer import train

    return train(cfg, remark, callbacks)


def predicted(cfg: Config) -> float:
    """Milliseconds of a step; raises UserError where it does not fit."""
    from compiler_trainer.planning.auto import what_fits
    from compiler_trainer.planning.dry import dry_run

    report = dry_run(cfg)
    memory = report["prediction"]["memory"]
    if not memory["fits"]:
        size = f"{memory['device_bytes'] / GIB:,.1f} of {cfg.cluster.hbm_gib:g} GiB"
        raise UserError("run.dry", f"does not fit {cfg.cluster.name}: {size} a GPU; {what_fits(cfg)}")
    return report["predicted"]["step_ms"]


def remark(cfg: Config, trained: Subject) -> str:
    """That it is predicted not to fit, or another mesh to be faster, else an empty string."""
    if sum(p.numel() for p in trained.module.parameters()) < LARGE:
        return ""
    from compiler_trainer.planning import auto

    return auto.remark(cfg, trained)
