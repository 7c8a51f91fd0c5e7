"""Memory and time of each recomputation policy, predicted and measured: `python -m tools.bench.remat`.

Each line runs in a separate process. Memory is the peak of live tensor bytes in a step, state included; `--budgets 10`
adds ten budgets between the peaks of `full` and `none`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from compiler_trainer import compile_step, models
from compiler_trainer.config.schema import ModelConfig
from compiler_trainer.training.speed import cpu_peak

POLICIES = ("none", "every_n", "selective", "full", "offload")
MIB, GIB = 2**20, 2**30


def measure(remat: dict[str, Any], backend: str, layers: int, rows: int, seq_len: int, steps: int) -> dict[str, Any]:
    """Compile and run a Llama of `layers` layers in this process."""
    model = models.build(ModelConfig(n_layers=layers))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (rows, seq_len + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    batch["positions"] = torch.arange(seq_len).expand(rows, seq_len).contiguous()
    began = time.perf_counter()
    step = compile_step(
        model,
        models.loss_fn,
        batch,
        optim={"lr": 1e-3, "max_norm": 1.0},
        passes={"remat": remat},
        lower={"backend": backend},
        initial=models.initial_parameters(model, 0, torch.float32),
    )
    compile_s = time.perf_counter() - began
    metrics = [step(batch)]
    measured, peak = cpu_peak(lambda: step(batch))
    metrics.append(measured)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        metrics.append(step(batch))
        seconds.append(time.perf_counter() - began)
    state = sum(tensor.nbytes for stored in step.state.values() for tensor in stored.local.values())
    passes = [p for p in step.report["passes"] if p["program"] == "step"]
    costs = passes[-1]["accounting"]
    return {
        "compile_s": compile_s,
        "step_ms": 1e3 * statistics.median(seconds),
        "predicted": costs["peak_bytes"],
        "measured": state + peak,
        "state": state,
        "alive": costs["alive"],
        "at": f"%{costs['peak_node']} ({costs['peak_line']})",
        "recomputed": next(p for p in passes if p["name"] == "remat")["report"]["counts"]["recomputed"],
        "metrics": metrics,
    }


def run(remat: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run `measure` in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.remat", "--one", json.dumps(remat)]
    command += ["--backend", args.backend, "--layers", str(args.layers), "--rows", str(args.rows)]
    command += ["--seq-len", str(args.seq_len), "--steps", str(args.steps)]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{remat}: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout.splitlines()[-1])


def line(label: str, result: dict[str, Any], reference: dict[str, Any]) -> str:
    """Return a row of the table; the gap of metrics is relative to `none`."""
    gap = max(abs(a[k] - b[k]) for a, b in zip(result["metrics"], reference["metrics"], strict=True) for k in a)
    predicted, measured = result["predicted"], result["measured"]
    cells = [
        label,
        f"{predicted / MIB:.2f}",
        f"{measured / MIB:.2f}",
        f"{100 * (measured / predicted - 1):+.2f} %",
        f"{(measured - result['state']) / MIB:.1f}",
        f"{result['step_ms']:,.0f}",
        str(result["recomputed"]),
        f"{result['compile_s']:.0f}",
        f"{gap:.1e}" if gap else "0",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, each line as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budgets", type=int, default=0, help="how many between the peaks of `full` and `none`")
    parser.add_argument("--headroom", type=float, default=0.0, help="share of a budget left free")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(json.loads(args.one), args.backend, args.layers, args.rows, args.seq_len, args.steps)))
        return
    print("| policy | predicted MiB | measured MiB | off by | above state MiB | step ms | repeated | compile s | gap |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    result: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        result[policy] = run({"policy": policy}, args)
        print(line(policy, result[policy], result["none"]), flush=True)
    low, high = result["full"]["predicted"], result["none"]["predicted"]
    for i in range(args.budgets):
        budget = low + (high - low) * (i + 1) / (args.budgets + 1)
        one = run({"policy": "budget", "budget_gib": budget / GIB, "headroom": args.headroom}, args)
        over = "" if one["measured"] <= budget else " OVER"
        print(line(f"budget {budget / MIB:.1f}{over}", one, result["none"]), flush=True)
    for policy, one in result.items():
        alive = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in one["alive"].items())
        print(f"{policy}: peak at {one['at']}; alive, MiB: {alive}")


if __name__ == "__main__":
    main()
