"""Kill ranks of elastic jobs at random moments: each job must finish, with the losses of an undisturbed run.

    python -m tests.nightly.survival --kills 100 --seed 1

Each job starts on 2 to 6 ranks, and loses ranks, one or two at a time, until one is left or it ends. Moments are drawn
over the whole job: imports, compiling, steps, snapshots, evaluations, checkpoints, and the recovery from another kill.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from compiler_trainer.training.metrics import FILE, read

ROOT = Path(__file__).parents[2]
STEPS = 120
OPTIONS = (
    "model.dim=32 model.n_layers=2 model.n_heads=2 model.n_kv_heads=2 model.ffn_dim=48 data=synthetic data.documents=60 "
    f"train.steps={STEPS} train.seq_len=32 train.global_batch_size=12 lower.backend=eager "
    "passes.verify=none run.dump_graphs=false run.snapshot_interval=5 checkpoint.interval=40 eval.interval=30 eval.batches=1"
)
MESHES = {
    2: ("mesh.dp_shard=2", "mesh.dp_replicate=2 mesh.dp_shard=1"),
    3: ("mesh.dp_shard=3",),
    4: ("mesh.dp_replicate=2 mesh.dp_shard=2", "mesh.dp_shard=2 mesh.cp=2", "mesh.dp_shard=2 mesh.tp=2"),
    6: ("mesh.dp_shard=6", "mesh.dp_replicate=3 mesh.tp=2 mesh.dp_shard=1"),
}
TOLERANCE = 2e-5  # of losses in fp32, which other meshes add up in another order
PATIENCE_S = 120.0  # without a new step


@dataclass
class Tally:
    """The results of all jobs."""

    seconds: list[float] = field(default_factory=list)  # from a kill to the next finished step
    repeated: list[int] = field(default_factory=list)  # steps that were done again after a kill
    kills: int = 0
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    """Kill ranks until there were enough; exit with 1 if a job hangs, is lost or has other losses."""
    parser = argparse.ArgumentParser("python -m tests.nightly.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, tally = random.Random(args.seed), Tally()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        assert launch(whole, 1, "").wait() == 0
        number = 0
        while tally.kills < args.kills:
            ranks = draw.choice(sorted(MESHES))
            mesh, folder = draw.choice(MESHES[ranks]), Path(scratch, str(number))
            problem = trial(folder, ranks, mesh, draw, tally) or difference(whole, folder)
            tally.wrong += [f"job {number}: {problem}"] if problem else []
            print(f"job {number}, {ranks} ranks, {mesh}: {problem or 'right'}; {tally.kills} kills", flush=True)
            if problem:
                print(folder.with_suffix(".log").read_text()[-6000:], flush=True)
            number += 1
    took = f"median {median(tally.seconds):.1f} s, longest {max(tally.seconds):.1f} s" if tally.seconds else "no step after any"
    again = f"{median(tally.repeated):g} steps done again in the median" if tally.repeated else ""
    print(f"{tally.kills} kills in {number} jobs: {took} to the next step; {again}; {len(tally.wrong)} wrong")
    sys.exit(1 if tally.wrong else 0)


def launch(folder: Path, ranks: int, mesh: str, spares: int = 0, flags: Collection[str] = ()) -> subprocess.Popen:
    """Start a job in a folder; its output is added to a file beside it."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "compiler_trainer", "launch", "-n", str(ranks), "--spares", str(spares), *flags, *OPTIONS.split(), *mesh.split()]
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen([*command, "run.elastic=true", f"run.dir={folder}"], env=env, stdout=log, stderr=log)


def trial(folder: Path, ranks: int, mesh: str, draw: random.Random, tally: Tally) -> str:
    """Run a job and kill its ranks; return the problem if it does not finish, or an empty string."""
    job = launch(folder, ranks, mesh, draw.choice((0, 0, 2)))
    least, killed = 2 if "tp=2" in mesh else 1, set[int]()
    while job.poll() is None and len(ranks_of(job)) < ranks:
        time.sleep(0.02)
    if draw.random() < 0.8:  # otherwise the first kill comes while the ranks start
        wait_for(job, folder, 1)
    while (code := job.poll()) is None and len(left := ranks_of(job, killed)) > least:
        time.sleep(draw.choice((0.0, 0.3, 3.0)) * draw.random())
        before = steps_of(folder)
        victims = draw.sample(left, min(draw.choice((1, 1, 1, 2)), len(left) - least))
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
                killed.add(victim.pid)
        tally.kills += len(victims)
        began = time.monotonic()
        if before == 0 or draw.random() < 0.3:  # the next kill comes during the recovery
            continue
        if not wait_for(job, folder, 1, changed=True):
            job.kill()
            return f"no step in {PATIENCE_S:g} s after a kill, with {len(left) - len(victims)} left"
        if job.poll() is None:
            tally.seconds.append(time.monotonic() - began)
            tally.repeated.append(before + 1 - steps_of(folder))
    try:
        code = job.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        return "it hangs"
    return f"exit code {code}" if code else ""


def wait_for(job: subprocess.Popen, folder: Path, step: int, changed: bool = False) -> bool:
    """Wait until a job has recorded a step, with `changed` a new one, or has ended; return False after `PATIENCE_S`."""
    end, size = time.monotonic() + PATIENCE_S, identity(folder)
    while job.poll() is None and time.monotonic() < end:
        if steps_of(folder) >= step and (not changed or identity(folder) != size and resumed(folder, size)):
            return True
        time.sleep(0.02)
    return job.poll() is not None


def identity(folder: Path) -> tuple[int, int]:
    """Return the inode and size of a run's records, which a resumed run writes again."""
    path = folder / FILE
    return (status.st_ino, status.st_size) if path.exists() and (status := path.stat()) else (0, 0)


def resumed(folder: Path, before: tuple[int, int]) -> bool:
    """Return True if a record was added after the run was resumed, or the run was not interrupted by the kill."""
    inode, size = identity(folder)
    return size > before[1] if inode == before[0] else bool(resumed_sizes.setdefault(inode, size) < size)


resumed_sizes: dict[int, int] = {}


def steps_of(folder: Path) -> int:
    """Return the number of steps that a run has recorded."""
    path = folder / FILE
    return path.read_text().count("\n") if path.exists() else 0


def ranks_of(job: subprocess.Popen, killed: Collection[int] = ()) -> list[psutil.Process]:
    """Return the processes of a job's ranks, without those `killed`, which the launcher may not have noticed yet."""
    try:
        return [child for child in psutil.Process(job.pid).children() if child.pid not in killed]
    except psutil.NoSuchProcess:
        return []


def difference(whole: Path, folder: Path) -> str:
    """Describe the first difference of a run's losses from an undisturbed run's, or return an empty string."""
    expected, records = read(whole / FILE), read(folder / FILE)
    if [r["step"] for r in records] != [r["step"] for r in expected]:
        return f"{len(records)} steps of {len(expected)}"
    for mine, other in zip(records, expected):
        for name in ("loss", "grad_norm", "eval_loss"):
            if abs(mine.get(name, 0.0) - other.get(name, 0.0)) > TOLERANCE:
                return f"step {mine['step']}: {name} is {mine.get(name)}, not {other.get(name)}"
    return ""


if __name__ == "__main__":
    main()
