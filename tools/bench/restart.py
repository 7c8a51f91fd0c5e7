"""Time of a job to its first step, by depth: `python -m tools.bench.restart --layers 4,12,24`.

It runs the command itself, in separate processes: cold with an empty cache; warm, with compiled regions and no
programs; and restarted, with both. CPU seconds, with `--ranks` those of rank 0, next to those of `import torch`; runs
alternate.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from os import environ
from pathlib import Path
from statistics import median
from typing import Any

DEFAULTS = ["train.steps=1", "eval.interval=null", "checkpoint.interval=null", "data=synthetic"]
STARTS = ("cold", "warm", "restart")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,12,24")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts and restarts of each depth, in turns")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="options of the trainer")
    args = parser.parse_args()
    print("| layers | import torch | cold | warm | restart | warm / cold | restart above import torch |")
    print("|---" * 7 + "|")
    for layers in map(int, args.layers.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            options = [*DEFAULTS, *args.overrides, f"model.n_layers={layers}"]
            print(row(layers, args.rounds, args.ranks, options, Path(scratch)), flush=True)


def row(layers: int, rounds: int, ranks: int, options: list[str], scratch: Path) -> str:
    """Return the row of a depth: medians of CPU seconds."""
    seconds_of: dict[str, list[float]] = {"cold": [start(options, ranks, scratch)]}
    for _ in range(rounds):
        shutil.rmtree(scratch / "cache" / "programs")
        seconds_of.setdefault("warm", []).append(start(options, ranks, scratch))
        seconds_of.setdefault("restart", []).append(start(options, ranks, scratch))
        seconds_of.setdefault("torch", []).append(importing())
    seconds = {name: median(values) for name, values in seconds_of.items()}
    cells = [f"{seconds[name]:.1f}" for name in STARTS]
    ratio, extra = seconds["warm"] / seconds["cold"], seconds["restart"] - seconds["torch"]
    return f"| {layers} | {seconds['torch']:.1f} | {' | '.join(cells)} | {ratio:.2f} | {extra:.1f} |"


def start(options: list[str], ranks: int, scratch: Path) -> float:
    """Return the CPU seconds of rank 0 before the first step."""
    run = scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    env = environ | {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache")}
    launch = ["launch", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-m", "compiler_trainer", *launch, *options, f"run.dir={run}"]
    subprocess.run(command, env=env, check=True, capture_output=True)
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report["start_cpu_s"]


def importing() -> float:
    """Return the CPU seconds of `import torch`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
