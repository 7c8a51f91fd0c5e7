"""The command line of a GPU session."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import tools.gpu_day
from compiler_trainer.doctor.machine import facts
from tools.gpu_day import page
from tools.gpu_day.parts import PARTS, Device, Part
from tools.gpu_day.results import FILE, Result, Session, read

STACKS_S = 5  # seconds for processes out of time to print their stacks
SIDE_BY_SIDE = {
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    "OMP_NUM_THREADS": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",  # with 32, of 23 processes on one H100 the last ones could not start CUDA
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts there is time for, or write the page; return 1 if a part failed or was not reached."""
    parser = argparse.ArgumentParser(
        "python -m tools.gpu_day", description=(tools.gpu_day.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_day"), help=f"a folder for {FILE} and run folders")
    parser.add_argument("--minutes", type=float, default=28, help="after which no part begins")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of part names")
    parser.add_argument("--device", choices=("cuda", "cpu", "none"), default="cuda", help="cpu: small; none: no step")
    again = "run the parts that no such file has a success of"
    parser.add_argument("--again", type=Path, nargs="+", default=(), metavar="RESULTS", help=again)
    parser.add_argument("--list", action="store_true", help="print the parts that fit, with their commands")
    parser.add_argument("--results", type=Path, nargs="+", help=f"{FILE} of one or more calls, for --write")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page of --results and end")
    args = parser.parse_args(arguments)
    if args.write:
        if not args.results:
            parser.error("--write needs --results FILE")
        page.write([read(path) for path in args.results], args.write)
        return 0
    parts = chosen(args.device, args.only, args.again)
    if args.list:
        return show(parts, args.device, args.out, args.minutes)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "none":
        return compile_all(parts, args.out)
    return run_all(parts, args.device, args.out, args.minutes)


def chosen(device: Device, patterns: Sequence[str], again: Sequence[Path]) -> list[Part]:
    """Return the parts for a device whose names match a pattern, except successes in the files `again`."""
    done = {name for path in again for name, result in read(path).results.items() if result.is_done}
    parts = [part for part in PARTS if any(fnmatch.fnmatch(part.name, pattern) for pattern in patterns)]
    return [part for part in parts if part.is_for(device) and part.name not in done]


def show(parts: Sequence[Part], device: Device, out: Path, minutes: float) -> int:
    """Print the parts in order with their commands, and when each begins if all before it take all their time."""
    begins = 0.0
    for _, group in groupby(parts, key=lambda part: part.alone or part.name):
        for part in group:
            when = "not reached" if begins >= minutes else f"from minute {begins:g}"
            print(f"{part.name} ({part.minutes:g} min, {when}): {shlex.join(part.arguments(device, out))}")
            begins += part.minutes if part.alone else 0
        if not part.alone and part is [p for p in parts if not p.alone][-1]:
            begins += max(p.minutes for p in parts if not p.alone)
    return 0


def compile_all(parts: Sequence[Part], out: Path) -> int:
    """Compile and predict the jobs of all parts for an absent GPU; return 1 if one fails."""
    failed = 0
    for part in parts:
        for name, command in part.ahead(out):
            result = run(name, command, 600, "none")
            print(
                f"{name}: exit {result.code}, {result.seconds:.0f} s", *[result.output] * bool(result.code), flush=True
            )
            failed += bool(result.code)
    return 1 if failed else 0


def run_all(parts: Sequence[Part], device: Device, out: Path, minutes: float) -> int:
    """Run parts until the time is up: those that check values side by side, then the others one at a time."""
    end = time.monotonic() + 60 * minutes
    session = Session({fact.name: fact.text for fact in facts()}, time.strftime("%Y-%m-%d"))
    together = [part for part in parts if not part.alone]
    with ThreadPoolExecutor(len(together) or 1) as pool:
        jobs = [pool.submit(measure, part, device, out, end) for part in together]
        for job in jobs:
            keep(job.result(), session, out)
    for part in parts:
        if part.alone:
            keep(measure(part, device, out, end), session, out)
    done = sum(result.is_done for result in session.results.values())
    print(f"{done} of {len(parts)} parts done: {out / FILE}", flush=True)
    return 0 if done == len(parts) else 1


def keep(result: Result, session: Session, out: Path) -> None:
    """Add a result to the session and print it."""
    session.add(result, out)
    status = "not reached" if result.code is None else f"exit {result.code}, {result.seconds:.0f} s"
    print(f"## {result.name}: {status}\n{result.output}\n", flush=True)


def measure(part: Part, device: Device, out: Path, end: float) -> Result:
    """Run a part for its minutes, or for the time that is left."""
    command = part.arguments(device, out)
    seconds = min(60 * part.minutes, end - time.monotonic())
    if seconds <= 0:
        return Result(part.name, shlex.join(command))
    bench = part.bench(out) / "bench.json"
    bench.unlink(missing_ok=True)
    result = run(part.name, command, seconds, device, {} if part.alone else SIDE_BY_SIDE)
    rounds = json.loads(bench.read_text()) if part.job and bench.exists() else {}
    return Result(result.name, result.command, result.code, result.seconds, result.output, rounds)


def run(name: str, command: Sequence[str], seconds: float, device: Device, env: dict[str, str] | None = None) -> Result:
    """Run `python -m command`; a process out of time prints its stacks and ends with code 124."""
    settings = {"HF_HUB_OFFLINE": "1", "COLUMNS": "160", "PYTHONFAULTHANDLER": "1", **(env or {})}
    settings |= {"CUDA_VISIBLE_DEVICES": ""} if device != "cuda" else {}
    began = time.monotonic()
    job = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | settings, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=seconds)
        code = job.returncode
    except subprocess.TimeoutExpired:
        output, code = stopped(job), 124
    elapsed_s = time.monotonic() - began
    return Result(name, shlex.join(command), code, elapsed_s, "\n".join(trimmed(output)))


def stopped(job: subprocess.Popen) -> str:
    """Let a job's processes print their stacks, kill them, and return the job's output."""
    os.killpg(job.pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        job.communicate(timeout=STACKS_S)
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(job.pid, signal.SIGKILL)
    return job.communicate()[0]


def trimmed(output: str) -> Iterator[str]:
    """Yield the lines of an output without trailing spaces."""
    return (line.rstrip() for line in output.strip().splitlines())
