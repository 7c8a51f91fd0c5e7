"""Memory of loading a transformers folder: bytes held by each rank and its peak, above its start.

python -m tools.bench.load FOLDER --ranks 4 --mesh dp_shard=2 tp=2
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from compiler_trainer.config.device import passes_on
from compiler_trainer.config.schema import Config, FolderConfig, LowerConfig, PassesConfig
from compiler_trainer.models.loss import INPUTS
from compiler_trainer.models.subject import subject
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.compile import initial_state
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks
from compiler_trainer.step.runtime import ProcessRanks

MIB = 2**20
PERIOD_S = 0.002


class Peak:
    """The peak resident bytes of this process during a block, above those at its start."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.process, self.done = psutil.Process(), threading.Event()
        self.before = self.bytes = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        """Sample the resident bytes until the block ends."""
        while not self.done.wait(PERIOD_S):
            self.bytes = max(self.bytes, self.process.memory_info().rss)

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()
        self.bytes -= self.before


def load(folder: str, mesh: dict[str, int]) -> None:
    """Load the folder on this rank and print its memory."""
    start_ranks()
    trained, named = subject(Config(model=FolderConfig(folder))), mesh_of(mesh)
    batch = {name: torch.zeros(named.world_size, 16, dtype=torch.int64) for name in INPUTS}
    cpu, passes = torch.device("cpu"), passes_on(PassesConfig(), False)
    request = CompileRequest(
        model=trained.module, loss_fn=trained.loss, batch=batch, mesh=named, passes=passes, train=False
    )
    program = compile_programs(request).programs["evaluate"].program
    runtime = ProcessRanks(named, LowerConfig(), cpu, lambda what: None)
    began = time.perf_counter()
    with Peak() as peak:
        state = initial_state([(program, 0)], runtime, program.mesh, cpu, trained.initial())
    seconds = time.perf_counter() - began
    held_bytes = sum(tensor.nbytes for stored in state.values() for tensor in stored.local.values())
    sizes = f"holds {held_bytes / MIB:.0f} MiB, peak {peak.bytes / MIB:.0f} MiB, {peak.bytes / held_bytes:.2f} of it"
    print(f"rank {rank()}: {sizes}, {seconds:.1f} s", flush=True)
    stop_ranks()


def main() -> int:
    """Start the ranks, or run as one of them; return the exit code."""
    parser = argparse.ArgumentParser("python -m tools.bench.load", description="Memory of loading a model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mesh", nargs="+", default=["dp_shard=2", "tp=2"], metavar="AXIS=SIZE")
    args = parser.parse_args()
    if "RANK" in os.environ:
        load(str(args.folder), {axis: int(size) for axis, size in (entry.split("=") for entry in args.mesh)})
        return 0
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "-m", "tools.bench.load"]
    return subprocess.run([sys.executable, *ranks, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
