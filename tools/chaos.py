"""Kill training at random moments and let it go on: it has to end with the bits of a run that nothing disturbed.

    python -m tools.chaos --trials 40 --ranks 2

In each trial, once or twice, all ranks get SIGKILL or one of them SIGKILL or SIGTERM, whatever they are at: a step, a
copy, a file, a rename. Every checkpoint there is has to be whole then. Then the same job starts again, with
`checkpoint.resume=auto`.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from compiler_trainer import checkpoint
from compiler_trainer.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LowerConfig,
    ModelConfig,
    OptimConfig,
    PassesConfig,
    RunConfig,
    TrainConfig,
)
from compiler_trainer.training.metrics import FILE, read
from compiler_trainer.training.pace import RANKS
from compiler_trainer.training.stop import EXIT_CODE
from compiler_trainer.training.trainer import train

STEPS = 24
SAID = 4000  # characters of a rank's log that are shown
PATIENCE_S = 120.0  # for ranks to end once one of them is gone
MEASURED = ("tokens_per_s", "step_ms", "data_ms", "tflops", "mfu", "peak_mem_bytes", *RANKS)  # differ from run to run
FORK = multiprocessing.get_context("fork")  # imports take longer than the runs


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    in_a_save: int = 0
    stops: int = 0
    wrong: int = 0


def main() -> None:
    """Run the trials; exits with 1 if one ends with other bits."""
    takes = argparse.ArgumentParser("python -m tools.chaos", description=__doc__)
    takes.add_argument("--trials", type=int, default=10)
    takes.add_argument("--ranks", type=int, default=2)
    takes.add_argument("--seed", type=int, default=0, help="of the moments")
    given = takes.parse_args()
    draw, tally = random.Random(given.seed), Tally()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        processes = start(job(whole), given.ranks, whole)
        wait_for_steps(whole, processes)
        began = time.monotonic()
        finish(processes, whole)
        took = time.monotonic() - began
        print(f"undisturbed: {STEPS} steps on {given.ranks} ranks in {took:.1f} s", flush=True)
        for number in range(given.trials):
            trial(Path(scratch, str(number)), given.ranks, took, draw, tally)
            wrong = differences(whole, Path(scratch, str(number)))
            tally.wrong += bool(wrong)
            print(f"trial {number}: {'; '.join(wrong) or 'the same bits'}", flush=True)
            if wrong:
                said = (last_words(Path(scratch, str(number)), r) for r in range(given.ranks))
                print(*said, sep="\n----\n", flush=True)
    seen = f"{tally.kills} interruptions, {tally.in_a_save} in a save, {tally.stops} times all ranks saved and stopped"
    print(f"{given.trials} trials, {seen}: {tally.wrong} with other bits")
    sys.exit(1 if tally.wrong else 0)


def job(folder: Path) -> Config:
    """A small run with a checkpoint after each step."""
    return Config(
        model=ModelConfig(dim=256, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=512),
        data=DataConfig(name="synthetic", documents=40),
        train=TrainConfig(steps=STEPS, seq_len=16, global_batch_size=4),
        optim=OptimConfig(lr=1e-2),
        lower=LowerConfig("eager"),
        passes=PassesConfig(roll=False, verify="off"),
        checkpoint=CheckpointConfig(interval=1, keep=3, resume="auto"),
        eval=EvalConfig(interval=8, batches=2),
        run=RunConfig(dir=str(folder), dump_graphs=False),
    )


def trial(folder: Path, ranks: int, took: float, draw: random.Random, tally: Tally) -> None:
    """Start, kill, and start again until it may end."""
    for _ in range(draw.choice((1, 2))):
        processes = start(job(folder), ranks, folder)
        if draw.random() < 0.9:  # else before the first step
            wait_for_steps(folder, processes)
        time.sleep(draw.uniform(0.0, 1.0) * took)
        number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        one_of_them = number == signal.SIGTERM or draw.random() < 0.5
        for victim in [draw.choice(processes)] if one_of_them else processes:
            if victim.is_alive():
                os.kill(victim.pid or 0, number)
        finish(processes, folder)
        tally.stops += {process.exitcode for process in processes} == {EXIT_CODE}
        tally.kills += 1
        tally.in_a_save += any(folder.glob("checkpoints/*.tmp"))
        for path in checkpoint.complete(folder / "checkpoints"):
            checkpoint.check(path)
    if not is_done(folder):
        finish(start(job(folder), ranks, folder), folder)


def wait_for_steps(folder: Path, processes: list[BaseProcess]) -> None:
    """Wait until steps are taken, or until there is nothing to wait for."""
    before = taken(folder)
    while taken(folder) == before and all(process.is_alive() for process in processes):
        time.sleep(0.005)


def taken(folder: Path) -> int:
    """How many steps are recorded."""
    return len(read(folder / FILE)) if (folder / FILE).exists() else 0


def start(cfg: Config, ranks: int, folder: Path) -> list[BaseProcess]:
    """The ranks of a job, as processes."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    processes: list[BaseProcess] = [FORK.Process(target=run, args=(cfg, r, ranks, port, folder)) for r in range(ranks)]
    for process in processes:
        process.start()
    return processes


def run(cfg: Config, rank: int, ranks: int, port: int, folder: Path) -> None:
    """Train as one rank."""
    log = os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # for a rank that hangs
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    train(replace(cfg, mesh=replace(cfg.mesh, dp_shard=ranks)))


def finish(processes: list[BaseProcess], folder: Path) -> None:
    """Wait for ranks; raises TimeoutError if one of them hangs, with what it was doing."""
    for process in processes:
        process.join(PATIENCE_S)
    hanging = [r for r, process in enumerate(processes) if process.is_alive()]
    for r in hanging:
        os.kill(processes[r].pid or 0, signal.SIGABRT)
        processes[r].join()
    if hanging:
        said = "\n".join(last_words(folder, r) for r in hanging)
        raise TimeoutError(f"ranks {hanging} hang:\n{said}")


def log_of(folder: Path, rank: int) -> Path:
    """What a rank says goes to a file beside the run folder."""
    return folder.with_name(f"{folder.name}.{rank}.log")


def last_words(folder: Path, rank: int) -> str:
    """The end of what a rank said; several threads that fail at once may cut each other's characters."""
    return log_of(folder, rank).read_text(errors="replace")[-SAID:]


def is_done(folder: Path) -> bool:
    """Whether a run took its last step and saved it."""
    return any(checkpoint.number_of(path) == STEPS for path in checkpoint.complete(folder / "checkpoints"))


def differences(whole: Path, other: Path) -> list[str]:
    """In what a run differs from another one: its records, where it stands, the bits of its state."""
    if not is_done(other):
        return ["it did not end"]
    found = []
    if records(whole) != records(other):
        found.append("other records")
    first, second = (checkpoint.opened(path / f"checkpoints/step_{STEPS:08}") for path in (whole, other))
    if where(first) != where(second):
        found.append("it stands elsewhere")
    digests = [{piece.key: piece.sha256 for of in one.pieces.values() for piece in of} for one in (first, second)]
    return found + sorted(key for key in digests[0] | digests[1] if digests[0].get(key) != digests[1].get(key))


def where(stored: checkpoint.Checkpoint) -> tuple[int, int, dict[str, Any]]:
    """Where training and its data stand."""
    return stored.index.step, stored.index.tokens, stored.index.data


def records(run: Path) -> list[dict[str, float]]:
    """What each step measured, but for times and memory."""
    return [{name: v for name, v in record.items() if name not in MEASURED} for record in read(run / FILE)]


if __name__ == "__main__":
    main()
