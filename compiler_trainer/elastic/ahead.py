"""Compile the programs for fewer ranks while a job trains, in a process that gets only idle time of the processors.

It begins after the first snapshot, with the options of this round and a smaller mesh: that of one rank fewer, and where
there are several machines, that of one machine fewer. A loss then costs no compilation, as if an earlier run had stored
the programs. Each machine compiles for itself, since it has its own stores.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from compiler_trainer.config.schema import Config
from compiler_trainer.elastic.shrink import shrunk
from compiler_trainer.step.captured import mesh_of

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMMAND = [sys.executable, "-m", "compiler_trainer.runs.idle"]


@contextmanager
def compiling_ahead(cfg: Config, on_machine: int, quiet: bool = False) -> Iterator[None]:
    """Compile for one rank fewer than the mesh of `cfg` has, and for `on_machine` fewer, until the block ends."""
    ranks = mesh_of(cfg.mesh).world_size
    smaller = [shrunk(cfg.mesh, ranks - lost) for lost in sorted({1, on_machine})]
    jobs = [replace(cfg, mesh=mesh) for mesh in dict.fromkeys(smaller) if mesh is not None]
    if not jobs or not cfg.run.compile_ahead or cfg.lower.programs is not None:
        yield
        return
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=output, env=env)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as options:  # it prints itself why it cannot start
        pickle.dump(jobs, options)
    try:
        yield
    finally:
        process.kill()
        process.wait()
