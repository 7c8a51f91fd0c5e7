"""Train a few steps under the profiler: `python -m tools.gpu_day.profile --out DIR OPTION=VALUE`.

After the report of `compiler-trainer profile` come the kernels that take longest, in microseconds a step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SHOWN = 45
STEPS = 3  # in a trace
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
SETTINGS = ("train.steps=8", "run.profile=true", "eval.interval=null", "checkpoint.interval=null")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and print the report; return the exit code of the first command that fails."""
    parser = argparse.ArgumentParser("python -m tools.gpu_day.profile")
    parser.add_argument("--out", type=Path, required=True, help="the run folder")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args(arguments)
    trainer = [sys.executable, "-m", "compiler_trainer"]
    for command in ([*args.options, *SETTINGS, f"run.dir={args.out}"], ["profile", str(args.out)]):
        if code := subprocess.run([*trainer, *command]).returncode:
            return code
    for path in sorted(args.out.glob("**/trace*.json.gz")):
        print("\n".join(longest(path)))
    return 0


def longest(path: Path) -> list[str]:
    """Return a line for each kernel that takes long: microseconds and launches a step, name."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in KERNELS]
    times, launches = Counter[str](), Counter[str]()
    for event in events:
        times[event["name"]] += event["dur"]
        launches[event["name"]] += 1
    total = sum(times.values())
    lines = [f"{path.name}: kernels take {total / STEPS:,.0f} us a step, {len(events) / STEPS:.0f} launches"]
    return lines + [
        f"{us / STEPS:10,.1f} us {launches[n] / STEPS:6.1f} x {n[:110]}" for n, us in times.most_common(SHOWN)
    ]


if __name__ == "__main__":
    sys.exit(main())
