"""Compile the programs for one rank fewer while a job trains, in a process that gets only idle time of the processors.

It begins after the first snapshot, with the options of this round and a smaller mesh. A rank that is lost then costs no
compilation, as if an earlier run had stored the programs.
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
def compiling_ahead(cfg: Config) -> Iterator[None]:
    """Compile for one rank fewer than the mesh of `cfg` has, until the block ends; do nothing if no mesh is smaller."""
    smaller = shrunk(cfg.mesh, mesh_of(cfg.mesh).world_size - 1)
    if smaller is None or not cfg.run.compile_ahead or cfg.lower.programs is not None:
        yield
        return
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=env)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as options:  # it prints itself why it cannot start
        pickle.dump(replace(cfg, mesh=smaller), options)
    try:
        yield
    finally:
        process.kill()
        process.wait()
