"""One job: trained, or compiled and predicted only, after planning its mesh if necessary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler_trainer.cli.imports import unwatched
from compiler_trainer.config.errors import RepeatingError, UserError
from compiler_trainer.config.schema import Config, is_open
from compiler_trainer.console import say

if TYPE_CHECKING:  # torch is slow to import, and a refusal of options does not need it
    from compiler_trainer.models.subject import Subject
    from compiler_trainer.training.callbacks import Callback
    from compiler_trainer.training.failures import Failure

GIB = 2**30
PATIENCE_S = 300  # of a rank while another prints what takes the memory
LARGE = 500_000_000  # parameters; smaller models get no remark on their mesh


def outcome(cfg: Config) -> float:
    """Train, and leave the process groups; return the loss, as `on_ranks`.

    Errors that would end the run again have the exit code `run.exit_codes.repeating`.
    """
    from compiler_trainer.step.ranks import stop_ranks

    try:
        loss = on_ranks(cfg)
    except (UserError, RepeatingError) as error:
        error.exit_code = cfg.run.exit_codes.repeating
        raise
    stop_ranks()  # not in a `finally`: a failed rank must end at once, because the others wait for it
    return loss


def on_ranks(cfg: Config, callbacks: Sequence[Callback] = ()) -> float:
    """Train; return the last loss. With `run.dry`, compile only and return the predicted milliseconds of a step.

    Raises UserError if a dry run does not fit; its report is written, and the error names settings that fit.
    """
    if is_open(cfg):
        from compiler_trainer.planning.auto import choose_automatic

        cfg = choose_automatic(cfg)
    if cfg.run.dry:
        return predicted(cfg)
    if cfg.run.elastic:
        from compiler_trainer.elastic.survive import survive
        from compiler_trainer.training.checkpoints import save_snapshot

        return survive(cfg, lambda cfg: trained(cfg, callbacks), save_snapshot)
    return trained(cfg, callbacks)


def trained(cfg: Config, callbacks: Sequence[Callback]) -> float:
    """Train; raise RepeatingError if memory runs out, after one rank has printed the settings that would fit."""
    with unwatched():
        from compiler_trainer.training.failures import failure_of
        from compiler_trainer.training.trainer import train

    try:
        return train(cfg, remark, callbacks)
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
    tell(cfg, failure)
    raise RepeatingError("out of memory; docs/guides/out-of-memory.md lists the settings that need less")


def tell(cfg: Config, failure: Failure) -> None:
    """Print the largest uses of memory and the settings that would fit, on one rank; the others wait to be ended."""
    from compiler_trainer.planning.out_of_memory import describe
    from compiler_trainer.step.ranks import another_store
    from compiler_trainer.training.failures import let_go

    store = another_store("memory")
    if store is not None and store.add("told", 1) > 1:
        time.sleep(PATIENCE_S)
        return
    say(f"rank {os.environ.get('RANK', '0')} is out of memory", sys.stderr)
    try:
        let_go()  # of everything that the error referenced
        for line in describe(cfg, failure):
            say(line, sys.stderr)
    except Exception as error:  # CUDA itself may not have started
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        say(f"the allocation was in {failure.where}; its report failed, too: {reason}", sys.stderr)


def predicted(cfg: Config) -> float:
    """Return the predicted milliseconds of a step; raise UserError if it does not fit."""
    from compiler_trainer.config.device import for_predicting
    from compiler_trainer.planning.auto import what_fits
    from compiler_trainer.planning.dry import dry_run

    cfg = for_predicting(cfg)
    report = dry_run(cfg)
    memory = report["prediction"]["memory"]
    if not memory["fits"]:
        size = f"{memory['device_bytes'] / GIB:,.1f} of {cfg.cluster.hbm_gib:g} GiB"
        raise UserError("run.dry", f"does not fit {cfg.cluster.name}: {size} a GPU; {what_fits(cfg)}")
    return report["predicted"]["step_ms"]


def remark(cfg: Config, trained: Subject) -> str:
    """Return a remark if the job is predicted not to fit, or another mesh to be faster; otherwise an empty string."""
    if sum(p.numel() for p in trained.module.parameters()) < LARGE:
        return ""
    from compiler_trainer.planning import auto

    return auto.remark(cfg, trained)
