"""Compile a job's programs and kernels in idle time, for `elastic/ahead.py`, which sends the options of the job."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
from dataclasses import replace

from compiler_trainer.config.device import for_running
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.elastic.machine import PR_SET_PDEATHSIG
from compiler_trainer.runs.ahead import compile_job
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.program_cache import ProgramCache
from compiler_trainer.step.ranks import local_device
from compiler_trainer.training.checkpoints import snapshots_of
from passes.ir.bodies import calls_of
from passes.lower.inductor import ALONE, compile_bodies

POLL_S = 0.5


def main() -> None:
    """Read the jobs from standard input, wait for a snapshot, and compile; print what was compiled, or why not."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    jobs = pickle.load(sys.stdin.buffer)
    wait_for_snapshot(jobs[0])
    for cfg in jobs:
        axes = ", ".join(f"{name} {size}" for name, size in vars(cfg.mesh).items() if size > 1) or "one rank"
        try:
            compile_all(cfg)
        except UserError as error:
            print(f"the programs for {axes} are not compiled ahead: {error}", file=sys.stderr, flush=True)
        else:
            print(f"the programs for {axes} are compiled ahead, for the case that ranks are lost", flush=True)


def wait_for_snapshot(cfg: Config) -> None:
    """Wait until the job has trained for a while."""
    folder = snapshots_of(cfg)
    while folder is not None and not (folder.exists() and any(folder.iterdir())):
        time.sleep(POLL_S)


def compile_all(cfg: Config) -> None:
    """Compile programs and kernels into the compiler's own stores."""
    cfg = validate(for_running(cfg), mesh_of(cfg.mesh).world_size)
    _, compiled = compile_job(cfg, local_device(), "", ProgramCache().store, lambda task: None)
    if cfg.lower.backend == "inductor":
        for captured in compiled.programs.values():
            compile_bodies(list(calls_of(captured.program)), captured.ctx, replace(ALONE, fast=cfg.lower.fast_start))


if __name__ == "__main__":
    main()
