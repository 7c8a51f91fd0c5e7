"""Train the default job on the CPU and on the GPU and compare losses: `python -m tools.gpu_day.losses --out DIR`.

In float32 (TF32 is off) the GPU's losses equal those of the CPU up to rounding; in bfloat16 they are close. Exit codes:
0 they agree, 1 one does not or a job failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Job(NamedTuple):
    """A run of the default job; `allowed` is the largest relative difference of a loss from the CPU's."""

    name: str
    options: tuple[str, ...]
    allowed: float
    on_cpu: bool = False


FP32 = ("passes.cast.param_dtype=null",)
COMMON = ("train.steps=12", "eval.interval=null")
JOBS = (
    Job("CPU, float32", FP32, 0.0, on_cpu=True),
    Job("GPU, float32", FP32, 2e-4),
    Job("GPU, float32, CUDA graphs", (*FP32, "lower.cudagraphs=true"), 2e-4),
    Job("GPU, bfloat16", (), 2e-2),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs side by side and print a table; return the exit code."""
    parser = argparse.ArgumentParser("python -m tools.gpu_day.losses")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run folders")
    out = parser.parse_args(arguments).out
    has_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    jobs = [job for job in JOBS if has_gpu or "cudagraphs" not in " ".join(job.options)]
    running = [start(job, out / str(number)) for number, job in enumerate(jobs)]
    codes = [process.wait() for process in running]
    losses = [losses_of(out / str(number)) for number in range(len(jobs))]
    ok = True
    for job, code, values in zip(jobs, codes, losses, strict=True):
        if code or not values:
            ok = False
            print(f"{job.name}: exit code {code}\n{(out / str(jobs.index(job)) / 'output').read_text()[-3000:]}")
            continue
        off = max((abs(a - b) / abs(b) for a, b in zip(values, losses[0])), default=float("nan"))
        right = len(values) == len(losses[0]) and off <= job.allowed
        ok &= right
        shown = " ".join(f"{value:.5f}" for value in values)
        print(f"{'right' if right else 'WRONG'}  {job.name}: off by {off:.1e} (allowed {job.allowed:.0e}): {shown}")
    return 0 if ok else 1


def start(job: Job, folder: Path) -> subprocess.Popen:
    """Start a job, its output in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if job.on_cpu else {})
    command = [sys.executable, "-m", "compiler_trainer", *COMMON, *job.options, f"run.dir={folder / 'run'}"]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)


def losses_of(folder: Path) -> list[float]:
    """Return the losses of all steps."""
    path = folder / "run" / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [line["loss"] for line in lines if "loss" in line]


if __name__ == "__main__":
    sys.exit(main())
