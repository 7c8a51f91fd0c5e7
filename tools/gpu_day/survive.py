"""Kill ranks of elastic jobs whose ranks share one GPU: `python -m tools.gpu_day.survive --out DIR`.

The ranks communicate by NCCL (`tools/gpu_day/ranks.py`). Each job must finish with the losses of one undisturbed rank.
Exit codes: 0 all do, 1 one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from compiler_trainer.cli.command import main as trainer
from compiler_trainer.elastic.launcher import Launcher
from compiler_trainer.elastic.member import MEMBER
from tools.gpu_day.ranks import ALONE

STEPS, ALLOWED, PATIENCE_S = 60, 2e-4, 100.0
STACKS_S = 2  # seconds for processes to print their stacks
LOG = 6000  # characters of a failed job's output that are printed
OPTIONS = (
    "data=synthetic", "data.tokenizer=bytes", f"train.steps={STEPS}", "train.seq_len=128", "train.global_batch_size=12",
    "passes.cast.param_dtype=null", "checkpoint.interval=null", "eval.interval=null", "run.snapshot_interval=5",
)  # fmt: skip


SMALL: tuple[str, ...] = ()
LARGE = ("model.dim=768", "model.n_layers=4", "model.n_heads=12", "model.n_kv_heads=12", "model.ffn_dim=2048",
         "train.seq_len=512")  # fmt: skip
EAGER = "lower.backend=eager"


class Job(NamedTuple):
    """An elastic job: its model, its ranks, and the steps after which one of them is killed.

    With a large model the host waits for the device, with a small one for nothing.
    """

    name: str
    model: tuple[str, ...]
    ranks: int
    options: tuple[str, ...]
    kills: tuple[int, ...]


JOBS = (
    Job("a large model, not compiled", LARGE, 3, ("mesh.dp_shard=3", EAGER), (7, 28)),
    Job("not compiled", SMALL, 3, ("mesh.dp_shard=3", EAGER), (7, 28)),
    Job("compiled", SMALL, 2, ("mesh.dp_shard=2",), (7,)),
    Job("a ring in CUDA graphs", SMALL, 2, ("mesh.cp=2", "mesh.dp_shard=1", "passes.context.method=ring",
                                            "passes.context.skip_steps=false", "lower.cudagraphs=auto"), (7,)),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs side by side, kill ranks, and print a line for each job; return the exit code."""
    parser = argparse.ArgumentParser("python -m tools.gpu_day.survive")
    parser.add_argument("--out", type=Path, help="a folder for the run folders")
    parser.add_argument("--ranks", type=int, help="start this many ranks of a job; 0: this process is one")
    parser.add_argument("options", nargs="*", help="of the job")
    args = parser.parse_args(arguments)
    if args.ranks == 0:
        return rank(args.options)
    if args.ranks:
        command = [sys.executable, "-m", "tools.gpu_day.survive", "--ranks", "0", *args.options]
        return Launcher(args.ranks, command, elastic=True).run()
    with ThreadPoolExecutor(len(JOBS) + 2) as pool:
        trials = [pool.submit(trial, job, args.out / str(number)) for number, job in enumerate(JOBS)]
        right = {model: pool.submit(undisturbed, args.out / f"right{len(model)}", model) for model in (LARGE, SMALL)}
        problems = [
            each.result() or difference(right[job.model].result(), args.out / str(number))
            for number, (job, each) in enumerate(zip(JOBS, trials, strict=True))
        ]
    for number, (job, problem) in enumerate(zip(JOBS, problems, strict=True)):
        print(f"{'WRONG' if problem else 'right'}  {job.name}: {problem}")
        if problem:
            print((args.out / f"{number}.log").read_text()[-LOG:])
    return 1 if any(problems) else 0


def rank(options: Sequence[str]) -> int:
    """Train as a rank that claims to be the only one of its machine."""
    os.environ |= {**ALONE, "MASTER_ADDR": os.environ["MASTER_ADDR"], "NCCL_HOSTID": f"rank{os.environ[MEMBER]}"}
    sys.argv[1:] = options
    trainer()
    return 0


def start(folder: Path, command: Sequence[str], options: Sequence[str]) -> subprocess.Popen:
    """Start a job in a folder; its output is in a file beside it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        command = [sys.executable, "-m", *command, *OPTIONS, *options, f"run.dir={folder}"]
        return subprocess.Popen(command, stdout=log, stderr=log)


def undisturbed(folder: Path, model: Sequence[str]) -> list[float]:
    """Return the losses of one rank that nobody kills."""
    start(folder, ["compiler_trainer"], [*model, EAGER]).wait()
    return losses(folder)


def trial(job: Job, folder: Path) -> str:
    """Run a job and kill its ranks; return the problem if it does not finish, after its processes printed stacks."""
    options = ["run.elastic=true", *job.model, *job.options]
    process = start(folder, ["tools.gpu_day.survive", "--ranks", str(job.ranks)], options)
    problem = killed(job, process, folder)
    if process.poll() is None:
        for child in children(process):
            child.send_signal(signal.SIGABRT)
        time.sleep(STACKS_S)
        process.kill()
    return problem


def killed(job: Job, process: subprocess.Popen, folder: Path) -> str:
    """Kill a job's ranks; print the seconds that each kill costs; return the problem if the job does not finish."""
    for step in job.kills:
        if not reaches(process, folder, step):
            return f"did not reach step {step}"
        before, began, left = len(losses(folder)), time.monotonic(), children(process)
        os.kill(left[len(left) // 2].pid, signal.SIGKILL)
        if not reaches(process, folder, before + 1):
            return f"took no step after a kill after step {before}"
        seconds = time.monotonic() - began
        print(f"{job.name}: killed after step {before}, the next step {seconds:.1f} s later", flush=True)
    try:
        code = process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        return "it hangs"
    return f"exit code {code}" if code else ""


def reaches(process: subprocess.Popen, folder: Path, steps: int) -> bool:
    """Wait until a job has recorded that many steps; return False if it ends before, or after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while len(losses(folder)) < steps:
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def children(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes that are the ranks of a job."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children()
    return []


def losses(folder: Path) -> list[float]:
    """Return the losses of all steps that a run has recorded."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def difference(expected: Sequence[float], folder: Path) -> str:
    """Describe how the losses of a run differ from those expected, or return an empty string."""
    actual = losses(folder)
    if len(actual) != len(expected):
        return f"{len(actual)} steps instead of {len(expected)}"
    off = max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
    return f"a loss is off by {off:.1e}" if not off <= ALLOWED else ""


if __name__ == "__main__":
    sys.exit(main())
