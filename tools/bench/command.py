"""Benchmark our trainer and stock PyTorch on the same job: `python -m tools.bench --ranks 2 mesh.tp=2`.

All contenders have the same model, data and ranks. Each is a separate job. It starts once with an empty cache (cold)
and once with the filled cache (warm), and keeps running; then steps are timed in turn, A B C A B C, while the other
jobs sleep. A contender that fails, or whose losses differ from plain PyTorch on one rank, is a row with its error.
Options are those of the trainer, including the mesh.

With `--once` each contender starts once, with an empty cache, and ends before the next begins: for models that fill a
device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import torch

from compiler_trainer.cli.extras import not_installed
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from tools.bench.job import WORKLOAD, composed
from tools.pages import renew, split, table

CONTENDERS = {
    "ours": "this trainer",
    "eager": "stock PyTorch, eager",
    "block": "stock, torch.compile of each block",
    "whole": "stock, torch.compile of the whole model",
}
REFERENCE = "eager"  # on one rank; its losses are the reference
TOLERANCE, IN_BF16, IN_FLOAT8 = 1e-3, 2e-2, 1e-1  # absolute differences of losses
MIB = 2**20
OUTPUT = 6000  # characters of a failed contender's output that are printed
HEADINGS = (
    "contender", "tokens/s", "ratio", "step ms", "floor / step", "peak MiB", "sent MiB", "first step cold, s",
    "cold CPU s", "warm, s", "warm CPU s", "bodies compiled cold, warm", "loss off by",
)  # fmt: skip

COLD = {"s": "first_s", "cpu_s": "first_cpu_s", "bodies": "bodies"}  # figures of a first step, with and without a cache
Found = dict[str, Any]
MEASURED = ("global_batch_size", "seq_len", "steps")  # options of train that count, or say only when to stop


def main() -> None:
    """Run the benchmark; exit with 0 whatever contenders do, with 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round, after an untimed one")
    parser.add_argument("--threads", type=int, help="of a rank; by default its share of the cores")
    parser.add_argument("--timeout-s", type=float, default=600, help="after which a contender has failed")
    parser.add_argument("--once", action="store_true", help="start each contender once, one after another")
    parser.add_argument("--unchecked", action="store_true", help="do not compare losses with plain PyTorch on one rank")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="contenders to run, in order")
    parser.add_argument("--out", type=Path, help="a folder for bench.json, bench.md and bench.html")
    parser.add_argument("--write", type=Path, help="replace the table between this benchmark's markers in a file")
    parser.add_argument("overrides", nargs="*", help="options of the trainer")
    args = parser.parse_args()
    try:
        check(args)
        results = measure(args)
        text = report(results, args)
        print(text)
        if args.out:
            save(args.out, results, text)
        if args.write:
            renew(args.write, title(args), text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def check_measured(cfg: Config) -> None:
    """Raise UserError if all contenders would ignore an option of the job."""
    usual = to_config(compose(WORKLOAD)).train
    names = [field.name for field in dataclasses.fields(usual) if field.name not in MEASURED]
    ignored = [f"train.{name}" for name in names if getattr(cfg.train, name) != getattr(usual, name)]
    ignored += ["mesh.pp"] * (cfg.mesh.pp > 1) + ["loss"] * bool(cfg.loss)
    if ignored:
        problem = "is no option of the benchmark, which would measure the job without it"
        raise UserError(ignored[0], f"{problem}; leave it out")


def check(args: argparse.Namespace) -> None:
    """Raise UserError for options that cannot run."""
    for name in args.contenders.split(","):
        if name not in CONTENDERS:
            raise UserError("--contenders", f"{name!r} is not one of {', '.join(CONTENDERS)}")
    if args.rounds < 1 or args.steps < 1:
        raise UserError("--rounds, --steps", "must be at least 1")
    check_measured(composed(args.overrides, args.ranks))
    if args.write:
        check_page(args.write, title(args))


def measure(args: argparse.Namespace) -> dict[str, list[Found]]:
    """Run the contenders; return the results of each by round. A failed contender is not run again."""
    return measured_once(args) if args.once else measured_in_turns(args)


def measured_once(args: argparse.Namespace) -> dict[str, list[Found]]:
    """Start each contender once, with an empty cache, run all its rounds and end it."""
    allowed = tolerance(composed(args.overrides, args.ranks))
    unchecked = {"error": "--unchecked"}
    with tempfile.TemporaryDirectory() as scratch:
        reference = (
            [unchecked] if args.unchecked else Job(REFERENCE, 1, args, Path(scratch, "reference"), rounds=1).all()
        )
        results = {}
        for name in args.contenders.split(","):
            first, *rounds = Job(name, args.ranks, args, Path(scratch, name)).all()
            first = compared(first | cold_figures(first), reference[0], allowed)
            results[name] = [first | round_result for round_result in rounds] or [first]
            if rounds:
                results[name][0] = compared(results[name][0], reference[-1], allowed)
            print(f"{name}: {results[name][-1].get('error') or one_line(results[name][-1])}", file=sys.stderr)
    return results


def measured_in_turns(args: argparse.Namespace) -> dict[str, list[Found]]:
    """Start each contender cold and warm, then run the rounds of all in turns."""
    names, allowed = args.contenders.split(","), tolerance(composed(args.overrides, args.ranks))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        reference = Job(REFERENCE, 1, args, Path(scratch, "reference"), rounds=1).all()
        reference = [reference[-1]] * 2 if "error" in reference[-1] else reference
        jobs, results = {}, {}
        for name in names:
            (cold,) = Job(name, args.ranks, args, Path(scratch, name), rounds=0).all()
            results[name] = [cold]
            if "error" not in cold:
                jobs[name] = running.enter_context(closing(Job(name, args.ranks, args, Path(scratch, name))))
                results[name] = [compared(cold_figures(cold) | jobs[name].first(), reference[0], allowed)]
            print(f"{name}: {results[name][-1].get('error', 'is ready')}", file=sys.stderr)
        for number in range(args.rounds):
            for name, job in jobs.items():
                so_far = results[name][-1]
                if "error" in so_far:
                    continue
                result = so_far | job.round(number)
                later = number > 0  # when rounding has grown
                results[name].append(result if later else compared(result, reference[1], allowed))
                print(f"round {number + 1}: {name}: {result.get('error') or one_line(result)}", file=sys.stderr)
    return {name: rounds[1:] or rounds for name, rounds in results.items()}


def cold_figures(first: Found) -> Found:
    """Return the figures of a first step with an empty cache by names of their own."""
    return {f"cold_{name}": first[figure] for name, figure in COLD.items() if figure in first}


class Job:
    """A contender in separate processes that runs rounds on request; after a failure each result has an `error`."""

    def __init__(self, name: str, ranks: int, args: argparse.Namespace, scratch: Path, rounds: int | None = None):
        self.results = scratch / "results"
        self.timeout_s, self.rounds = args.timeout_s, args.rounds if rounds is None else rounds
        shutil.rmtree(self.results, ignore_errors=True)
        self.results.mkdir(parents=True)
        overrides = args.overrides if ranks == args.ranks else [o for o in args.overrides if not o.startswith("mesh")]
        launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        job = ["-m", "tools.bench.job", name, str(self.results), str(self.rounds), str(args.steps), *overrides]
        threads = args.threads or max(1, (os.cpu_count() or 1) // args.ranks)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache")}
        self.output = (scratch / "output").open("w+")
        command = [*launch, f"--nproc-per-node={ranks}", *job]
        self.worker = subprocess.Popen(command, env=env, stdout=self.output, stderr=subprocess.STDOUT, text=True)

    def first(self) -> Found:
        """Return the results of its first steps."""
        return self.result("first")

    def round(self, number: int) -> Found:
        """Return the results of a round."""
        (self.results / f"go{number}").touch()
        return self.result(f"round{number}")

    def all(self) -> list[Found]:
        """Return the results of its first steps and of all rounds in sequence."""
        with closing(self):
            results = [self.first()]
            for number in range(self.rounds):
                if "error" not in results[-1]:
                    results.append(self.round(number))
            return results

    def result(self, name: str) -> Found:
        """Return the contents of a result file, or the error if there is none."""
        path, deadline = self.results / f"{name}.json", time.monotonic() + self.timeout_s
        while not path.exists():
            ended = self.worker.poll() is not None
            if (ended or time.monotonic() > deadline) and not path.exists():
                return self.why(ended)
            time.sleep(0.1)
        return json.loads(path.read_text())

    def why(self, ended: bool) -> Found:
        """Return the error of the rank that failed first, or what is known otherwise."""
        self.close()
        output = (self.results.parent / "output").read_text()
        print(output[-OUTPUT:], file=sys.stderr)
        if error := first_error(self.results):
            return error
        if not ended:
            return {"error": f"no result after {self.timeout_s:.0f} s"}
        return {"error": f"exit code {self.worker.returncode}: {' '.join(output.split()[-30:])}"}

    def close(self) -> None:
        """End all processes: torchrun ends its ranks, except those that it was just about to start."""
        last = f"round{self.rounds - 1}" if self.rounds else "first"
        if not (self.results / f"{last}.json").exists():
            self.worker.terminate()  # does nothing to one that has ended
        try:
            self.worker.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.worker.kill()
        leftover = [p for p in psutil.process_iter(["cmdline"]) if str(self.results) in (p.info["cmdline"] or ())]
        for process in leftover:
            process.kill()
        psutil.wait_procs(leftover, timeout=60)
        self.output.close()


def first_error(results: Path) -> Found | None:
    """Return the error of the rank that failed first; None if there is none."""
    errors = (json.loads(path.read_text()) for path in results.glob("error.*.json"))
    return min(errors, key=lambda error: error["at"], default=None)


def tolerance(cfg: Config) -> float:
    """Return the largest difference of losses from plain PyTorch, which has no float8, in the precision of a job."""
    cast = cfg.passes.cast
    return IN_FLOAT8 if cast.float8 else IN_BF16 if cast.param_dtype == "bfloat16" else TOLERANCE


def compared(result: Found, reference: Found, tolerance: float = TOLERANCE) -> Found:
    """Return a result with the difference of its losses from the reference.

    It is an error if the difference is too large; without a reference, the result has the reason as `unknown`.
    """
    if "error" in result:
        return result
    if "error" in reference:
        return {**result, "unknown": f"losses are not compared: plain PyTorch on one rank failed: {reference['error']}"}
    differences = [abs(a - b) for a, b in zip(result["losses"], reference["losses"], strict=True)]
    error = math.nan if any(map(math.isnan, differences)) else max(*differences, result.get("off", 0.0))
    too_far = (
        {"error": f"losses are off by {error:.1e} from plain PyTorch on one rank"} if not error <= tolerance else {}
    )
    return {**result, "off": error, **too_far}


def one_line(result: Found) -> str:
    """Return a round in one line, to show while others run."""
    return f"{result['tokens_per_s']:,.0f} tokens/s, {result['step_ms']:,.0f} ms a step"


# ---- the table ----------------------------------------------------------------------------------


def report(results: dict[str, list[Found]], args: argparse.Namespace) -> str:
    """Return the table in Markdown, the machine, and the errors of failed contenders."""
    fastest_stock = max((median(results[n], "tokens_per_s") for n in ran(results) if n != "ours"), default=None)
    floor_ms = median(results["ours"], "floor_ms") if "ours" in ran(results) else None
    rows = [row(name, rounds, fastest_stock, floor_ms) for name, rounds in results.items()]
    failed = [f"- {CONTENDERS[n]}: {r[-1]['error']}" for n, r in results.items() if "error" in r[-1]]
    failed += dict.fromkeys(f"- {r[-1]['unknown']}" for r in results.values() if "unknown" in r[-1])
    command = f"`python -m tools.bench {' '.join(arguments(args))}`"
    floor = f" Floor, the matrix products and attention kernels alone: {floor_ms:,.0f} ms." if floor_ms else ""
    return "\n".join([f"{command}: {machine()}.{floor}", "", table(HEADINGS, rows), *([""] if failed else []), *failed])


def row(name: str, rounds: Sequence[Found], fastest_stock: float | None, floor_ms: float | None) -> list[str]:
    """Return a row for a contender: medians of its rounds, with lowest and highest in parentheses."""
    if "error" in rounds[-1]:
        return [CONTENDERS[name], "failed", *[""] * (len(HEADINGS) - 2)]
    speeds = [r["tokens_per_s"] for r in rounds]
    speed, sent = median(rounds, "tokens_per_s"), rounds[0]["sent_bytes"]
    return [
        CONTENDERS[name],
        f"{speed:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
        f"{speed / fastest_stock:.2f}" if fastest_stock else "",
        f"{median(rounds, 'step_ms'):,.0f}",
        f"{floor_ms / median(rounds, 'step_ms'):.2f}" if floor_ms else "",
        f"{median(rounds, 'peak_bytes') / MIB:,.1f}",
        "" if sent is None else f"{sent / MIB:,.2f}",
        *(f"{rounds[-1][figure]:.1f}" for figure in ("cold_s", "cold_cpu_s", "first_s", "first_cpu_s")),
        ", ".join(str(rounds[-1][x].get("compiled", 0)) for x in ("cold_bodies", "bodies")) if name == "ours" else "",
        f"{rounds[-1]['off']:.0e}" if "off" in rounds[-1] else "",
    ]


def ran(results: dict[str, list[Found]]) -> list[str]:
    """Return the contenders that did not fail."""
    return [name for name, rounds in results.items() if "error" not in rounds[-1]]


def median(rounds: Sequence[Found], key: str) -> float:
    """Return the median of a figure over rounds."""
    return statistics.median(r[key] for r in rounds)


def machine() -> str:
    """Return the machine and its load average."""
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} {platform.machine()} cores"
    )
    return f"{device}, torch {torch.__version__}, load average {os.getloadavg()[2]:.1f} over the last 15 minutes"


def arguments(args: argparse.Namespace) -> list[str]:
    """Return the options that repeat the benchmark."""
    names = [] if args.contenders == ",".join(CONTENDERS) else [f"--contenders {args.contenders}"]
    names += [] if args.threads is None else [f"--threads {args.threads}"]
    names += [f"--{flag}" for flag in ("once", "unchecked") if getattr(args, flag)]
    return [f"--ranks {args.ranks}", f"--rounds {args.rounds}", f"--steps {args.steps}", *names, *args.overrides]


# ---- files --------------------------------------------------------------------------------------


def title(args: argparse.Namespace) -> str:
    """Return the name of a benchmark in the markers of a file, with its mesh."""
    return f"bench {' '.join(o for o in args.overrides if o.startswith('mesh.')) or f'{args.ranks} rank'}"


def check_page(path: Path, name: str) -> None:
    """Raise UserError if a page has no generated part of a name."""
    try:
        split(path.read_text(encoding="utf-8"), name)
    except ValueError as error:
        raise UserError(str(path), str(error)) from error


def save(folder: Path, results: dict[str, list[Found]], text: str) -> None:
    """Write every round, the table, and the plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "bench.md").write_text(text + "\n")
    try:
        plot(results).write_html(folder / "bench.html", include_plotlyjs=True)
    except ModuleNotFoundError as error:
        print(f"no bench.html: {not_installed(error)}", file=sys.stderr)


def plot(results: dict[str, list[Found]]) -> Any:
    """Return a plotly figure: medians as bars with their spread; a bar for each contender that did not fail."""
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    shown = (("tokens_per_s", "tokens/s", 1), ("peak_bytes", "peak memory, MiB", MIB), ("cold_s", "cold start, s", 1))
    names = ran(results)
    figure = make_subplots(1, len(shown), subplot_titles=[heading for _, heading, _ in shown])
    for position, (key, _, unit) in enumerate(shown, 1):
        medians = [median(results[n], key) / unit for n in names]
        up = [max(r[key] for r in results[n]) / unit - m for n, m in zip(names, medians)]
        down = [m - min(r[key] for r in results[n]) / unit for n, m in zip(names, medians)]
        spread = {"type": "data", "array": up, "arrayminus": down}
        figure.add_trace(go.Bar(x=names, y=medians, error_y=spread, showlegend=False), 1, position)
    return figure.update_layout(template="plotly_white", height=420)
