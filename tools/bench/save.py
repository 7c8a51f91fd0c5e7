"""The time that a step waits for a checkpoint: the blocking copy, and the full time of writing.

    python -m tools.bench.save --mib 300 --ranks 1 2

State is random and sharded over the ranks, which are processes; files are flushed to the disk of `--folder`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from compiler_trainer.checkpoint import Saver, TrainState
from compiler_trainer.config.schema import CheckpointConfig
from compiler_trainer.step.ranks import HOST
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec

TENSORS, ROWS = 24, 1024


@dataclass
class Sharded:
    """State on one of several ranks, sharded over its first dim."""

    mesh: Mesh
    ranks: tuple[int, ...]
    state: dict[str, tuple[Spec, dict[int, Tensor]]]

    def tensors(self) -> dict[str, tuple[Spec, dict[int, Tensor]]]:
        """Return all of the state."""
        return self.state


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser("python -m tools.bench.save", description=__doc__)
    parser.add_argument("--mib", type=int, default=300)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            mp.spawn(measure, (ranks, args.mib, args.rounds, Path(scratch)), nprocs=ranks)


def measure(rank: int, ranks: int, mib: int, rounds: int, folder: Path) -> None:
    """Save several times, waiting for the copy alone and then for the rest; rank 0 prints the medians."""
    if ranks > 1:
        dist.init_process_group(HOST, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    columns = mib * 2**20 // (TENSORS * ROWS * 4)
    spec = Spec(((Factor(ROWS, ("dp_shard",) if ranks > 1 else ()),), (Factor(columns),)))
    names = [f"model.{number}" for number in range(TENSORS)]
    state = {name: (spec, {rank: torch.randn(ROWS // ranks, columns)}) for name in names}
    step = Sharded(Mesh.of({"dp_shard": ranks} if ranks > 1 else {}), (rank,), state)
    blocked, total = [], []
    with Saver(step, folder / "checkpoints", CheckpointConfig(keep=1)) as saver:
        for number in range(rounds):
            began = time.perf_counter()
            saver.save(TrainState(step=number, tokens=0, data={}, config={}))
            blocked.append(1e3 * (time.perf_counter() - began))
            saver.wait()
            total.append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        wait, written = statistics.median(blocked), statistics.median(total)
        share = f"{wait:.0f} ms of the {written:.0f} that saving takes, {wait / written:.1%}"
        print(f"{mib} MiB on {ranks} ranks: a step waits {share}", flush=True)


if __name__ == "__main__":
    main()
