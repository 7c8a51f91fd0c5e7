"""Kill training at random moments and resume it: it must end with the bits of an undisturbed run.

    python -m tests.nightly.chaos --trials 40 --ranks 2

Each trial applies one or two of DISTURBANCES, whatever the ranks are doing: a step, a copy, a file, a rename. Every
complete checkpoint must then be intact. In some trials a byte of the token cache changes too, with its file's time
kept. Then the same job starts again, with `checkpoint.resume=auto`.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import torch

from compiler_trainer import checkpoint
from compiler_trainer.cli.ends import refuse
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import (
    AccumulateConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ExitCodes,
    LowerConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PassesConfig,
    RunConfig,
    TrainConfig,
)
from compiler_trainer.training import owner, prepare
from compiler_trainer.training.anomalies import RANKS
from compiler_trainer.training.metrics import FILE, read
from compiler_trainer.training.trainer import train

STEPS = 24
LOG_CHARACTERS = 4000  # characters of a rank's log to print
LOG_S = 10.0
PATIENCE_S = 120.0  # for ranks to end after one of them is gone
MEASURED = ("tokens_per_s", "images_per_s", "step_ms", "data_ms", "tflops", "mfu", "peak_mem_bytes", *RANKS)  # metrics that differ from run to run
FORK = multiprocessing.get_context("fork")  # saves the imports, which take longer than the runs


@dataclass
class Tally:
    """The counts of all trials."""

    happened: Counter[str] = field(default_factory=Counter)
    in_a_save: int = 0
    stops: int = 0
    wrong: int = 0


def main() -> None:
    """Run the trials; exit with 1 if one ends with other bits."""
    parser = argparse.ArgumentParser("python -m tests.nightly.chaos", description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages; the ranks are split evenly among them")
    parser.add_argument("--once", action="store_true", help="use two microbatches; gather and reduce once per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    args = parser.parse_args()
    draw, tally = random.Random(args.seed), Tally()
    layout = args.stages, args.once
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = Path(scratch, "whole")
        processes = start(job(undisturbed, *layout), args.ranks, undisturbed)
        wait_for_steps(undisturbed, processes)
        began = time.monotonic()
        finish(processes, undisturbed)
        seconds = time.monotonic() - began
        print(f"undisturbed: {STEPS} steps on {args.ranks} ranks in {seconds:.1f} s", flush=True)
        for number in range(args.trials):
            folder = Path(scratch, str(number))
            errors = trial(job(folder, *layout), folder, args.ranks, seconds, draw, tally)
            wrong = [*filter(None, errors.values()), *differences(undisturbed, folder)]
            tally.wrong += bool(wrong)
            print(f"trial {number}, {', '.join(errors)}: {'; '.join(wrong) or 'the same bits'}", flush=True)
            if wrong:
                logs = (last_words(folder, r) for r in range(args.ranks))
                print(*logs, sep="\n----\n", flush=True)
        restarts = restarted(Path(scratch))
    counts = ", ".join(f"{count} {name}" for name, count in tally.happened.items())
    counts = f"{counts}; {tally.in_a_save} during a save, all ranks saved and stopped {tally.stops} times"
    print(f"{args.trials} trials, {counts}: {tally.wrong} with other bits")
    print(restarts)
    sys.exit(1 if tally.wrong else 0)


def job(folder: Path, stages: int = 1, once: bool = False) -> Config:
    """Return the config of a small run with a checkpoint after each step."""
    accumulate = AccumulateConfig("step", "step") if once else AccumulateConfig()
    return Config(
        model=ModelConfig(dim=256, n_layers=stages, n_heads=2, n_kv_heads=1, ffn_dim=512),
        data=DataConfig(name="synthetic", documents=40, cache=str(folder.parent / "tokens")),
        mesh=MeshConfig(pp=stages),
        train=TrainConfig(steps=STEPS, seq_len=16, global_batch_size=4, microbatches=2 if stages > 1 or once else 1),
        optim=OptimConfig(lr=1e-2),
        lower=LowerConfig("eager"),
        passes=PassesConfig(fold_layers=False, verify="none", accumulate=accumulate),
        checkpoint=CheckpointConfig(interval=1, keep=3, resume="auto"),
        eval=EvalConfig(interval=8, batches=2),
        run=RunConfig(dir=str(folder), dump_graphs=False),
    )


def trial(cfg: Config, folder: Path, ranks: int, took: float, draw: random.Random, tally: Tally) -> dict[str, str]:
    """Start, disturb and restart a run until it ends; return each disturbance with the error it caused, or ""."""
    errors = {}
    for _ in range(draw.choice((1, 2))):
        processes = start(cfg, ranks, folder)
        if draw.random() < 0.9:  # otherwise disturb before the first step
            wait_for_steps(folder, processes)
        time.sleep(draw.uniform(0.0, 1.0) * took)
        name = draw.choice([*DISTURBANCES])
        errors[name] = DISTURBANCES[name](processes, cfg, took, draw)
        finish(processes, folder)
        tally.happened[name] += 1
        tally.stops += {process.exitcode for process in processes} == {ExitCodes.stopped}
        tally.in_a_save += any(folder.glob("checkpoints/*.tmp"))
        for path in checkpoint.complete(folder / "checkpoints"):
            checkpoint.check(path)
        if draw.random() < 0.3:
            errors["a byte of the token cache"] = alter(folder.parent / "tokens", draw)
    if not is_done(folder):
        finish(start(cfg, ranks, folder), folder)
    return errors


# Disturbances: each takes the ranks, their job, the seconds of a full run and a random source, and returns the error it
# caused, or "".


def kill_all(processes: list[BaseProcess], cfg: Config, took: float, draw: random.Random) -> str:
    """Send SIGKILL to all ranks."""
    return send(processes, signal.SIGKILL)


def kill_one(processes: list[BaseProcess], cfg: Config, took: float, draw: random.Random) -> str:
    """Send SIGKILL to one rank."""
    return send([draw.choice(processes)], signal.SIGKILL)


def stop_one(processes: list[BaseProcess], cfg: Config, took: float, draw: random.Random) -> str:
    """Send SIGTERM to one rank."""
    return send([draw.choice(processes)], signal.SIGTERM)


def stop_all_twice(processes: list[BaseProcess], cfg: Config, took: float, draw: random.Random) -> str:
    """Send SIGTERM to all ranks twice within moments, as a scheduler and torchrun together do."""
    folder = Path(cfg.run.dir)
    was_taken = taken(folder)
    send(processes, signal.SIGTERM)
    time.sleep(draw.choice((0.0, 0.001, 0.02, 0.3)))
    send(processes, signal.SIGTERM)
    finish(processes, folder)
    lost = was_taken and not is_done(folder) and {p.exitcode for p in processes} != {ExitCodes.stopped}
    return f"two signals ended the run with exit codes {[p.exitcode for p in processes]}" if lost else ""


def start_another(processes: list[BaseProcess], cfg: Config, took: float, draw: random.Random) -> str:
    """Start the same job in the same folder: it must be refused while the first one runs."""
    folder = Path(cfg.run.dir)
    others = start(cfg, len(processes), folder, patience_s=0.1)
    finish(others, folder)
    both = all(p.is_alive() for p in processes) and any(p.exitcode in (0, ExitCodes.stopped) for p in others)
    return "two runs in one folder" if both else ""


def fill_disk(processes: list[BaseProcess], cfg: Config, took: float, draw: random.Random) -> str:
    """Forbid all ranks to grow any file for a while."""
    for limit in (0, resource.RLIM_INFINITY):
        for process in (p for p in processes if p.is_alive()):
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid or 0, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        time.sleep(draw.uniform(0.0, 0.5) * took if limit == 0 else 0.0)
    return ""


DISTURBANCES: dict[str, Callable[[list[BaseProcess], Config, float, random.Random], str]] = {
    "all killed": kill_all,
    "one killed": kill_one,
    "one stopped": stop_one,
    "all stopped twice": stop_all_twice,
    "another in its folder": start_another,
    "a full disk": fill_disk,
}


def send(processes: list[BaseProcess], number: int) -> str:
    """Send a signal to the processes that are alive."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid or 0, number)
    return ""


def alter(cache: Path, draw: random.Random) -> str:
    """Flip one bit in a file of the token cache and keep the file's time."""
    path = draw.choice(sorted(p for p in cache.glob("*/*") if p.suffix in (".bin", ".json") and p.stat().st_size))
    at, content = path.stat(), bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    return ""


# Processes


def wait_for_steps(folder: Path, processes: list[BaseProcess]) -> None:
    """Wait until a step is recorded or a rank ends."""
    before = taken(folder)
    while taken(folder) == before and all(process.is_alive() for process in processes):
        time.sleep(0.005)


def taken(folder: Path) -> int:
    """Return the number of recorded steps."""
    return len(read(folder / FILE)) if (folder / FILE).exists() else 0


def start(cfg: Config, ranks: int, folder: Path, patience_s: float = owner.PATIENCE_S) -> list[BaseProcess]:
    """Start the ranks of a job as processes; they wait `patience_s` seconds for a folder that another job holds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = [(cfg, r, ranks, port, folder, patience_s) for r in range(ranks)]
    processes: list[BaseProcess] = [FORK.Process(target=run, args=args) for args in arguments]
    for process in processes:
        process.start()
    return processes


def run(cfg: Config, rank: int, ranks: int, port: int, folder: Path, patience_s: float) -> None:
    """Train as one rank."""
    with open(log_of(folder, rank), "ab") as log:  # written by another process, whose disk never fills up
        with suppress(BlockingIOError):  # the process holds the lock until it has written everything: see `last_words`
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, start_new_session=True).stdin
    assert pipe is not None
    os.dup2(pipe.fileno(), 1)
    os.dup2(pipe.fileno(), 2)
    pipe.close()
    owner.PATIENCE_S = patience_s
    next(prepare.runs)  # count seconds from now, not from the imports before the fork
    faulthandler.enable()  # SIGABRT prints the stack traces of a rank that hangs
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        train(replace(cfg, mesh=replace(cfg.mesh, dp_shard=ranks // cfg.mesh.pp)))
    except UserError as error:
        refuse(error)


def finish(processes: list[BaseProcess], folder: Path) -> None:
    """Wait for the ranks; raise TimeoutError with their stack traces if any of them hangs."""
    for process in processes:
        process.join(PATIENCE_S)
    hanging = [r for r, process in enumerate(processes) if process.is_alive()]
    for r in hanging:
        os.kill(processes[r].pid or 0, signal.SIGABRT)
        processes[r].join()
    if hanging:
        logs = "\n".join(last_words(folder, r) for r in hanging)
        raise TimeoutError(f"ranks {hanging} hang:\n{logs}")


def log_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log, next to the run folder."""
    return folder.with_name(f"{folder.name}.{rank}.log")


def last_words(folder: Path, rank: int) -> str:
    """Return the end of a rank's log, which is complete if the rank has ended, unless its writer takes `LOG_S`.

    Threads that fail at once may cut each other's UTF-8, hence errors="replace".
    """
    end = time.monotonic() + LOG_S
    with open(log_of(folder, rank), "rb") as log:
        while not is_unlocked(log) and time.monotonic() < end:
            time.sleep(0.01)
        return log.read().decode(errors="replace")[-LOG_CHARACTERS:]


def is_unlocked(file: BinaryIO) -> bool:
    """Return True if no other process holds a lock of a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def restarted(scratch: Path) -> str:
    """Report the seconds from a restart to its first step, without imports, which the fork inherits."""
    logs = "".join(log.read_text(errors="replace") for log in scratch.glob("*.0.log"))
    seconds = [float(number) for number in re.findall(r"^restarted in ([\d.]+) s", logs, re.MULTILINE)] or [0.0]
    return f"{len(seconds)} restarts: median {median(seconds):.1f} s to the first step, at most {max(seconds):.1f} s"


def is_done(folder: Path) -> bool:
    """Return True if a run took and saved its last step."""
    return any(checkpoint.number_of(path) == STEPS for path in checkpoint.complete(folder / "checkpoints"))


def differences(run: Path, other: Path) -> list[str]:
    """List the differences between two runs: records, position in the data, names of values with other bits."""
    if not is_done(other):
        return ["the run did not end"]
    names = []
    if records(run) != records(other):
        names.append("other records")
    first, second = (checkpoint.opened(path / f"checkpoints/step_{STEPS:08}") for path in (run, other))
    if position(first) != position(second):
        names.append("other position in the data")
    digests = [{piece.key: piece.sha256 for of in one.pieces.values() for piece in of} for one in (first, second)]
    return names + sorted(key for key in digests[0] | digests[1] if digests[0].get(key) != digests[1].get(key))


def position(stored: checkpoint.Checkpoint) -> tuple[int, int, dict[str, Any]]:
    """Return the position of training and of its data."""
    return stored.index.step, stored.index.tokens, stored.index.data


def records(run: Path) -> list[dict[str, float]]:
    """Return each step's metrics without times and memory."""
    return [{name: v for name, v in record.items() if name not in MEASURED} for record in read(run / FILE)]


if __name__ == "__main__":
    main()
