"""Predicted against measured, on this machine: `python -m tools.bench.predicted --ranks 2 --out FILE.json`.

The machine is calibrated with as many ranks (`compiler-trainer calibrate`), then each setting is trained for a few
steps and predicted. Results are added to the file. The table has medians of a setting's runs, because the speed of a
shared machine varies by the minute. `backend` is the backend that runs and is predicted: eager runs every operator as a
kernel. `clock` is the quantity compared: the time of steps, or with `cpu` a rank's CPU time in a step with its
collectives and without its waiting, which is the same on a busy machine. `--budgets 10` adds ten budgets of memory
between the predicted peaks of the policies `full` and `none`; a peak above its budget is marked OVER.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from compiler_trainer.calibrate.measure import measure, options_of
from compiler_trainer.calibrate.probes import CLOCKS
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import ClusterConfig
from compiler_trainer.planning.dry import compile_dry, predict_step
from tools.bench.command import Job
from tools.bench.job import composed
from tools.pages import table

MIB, GIB = 2**20, 2**30
FIGURES = ("measured_ms", "predicted_ms", "measured_bytes", "predicted_bytes", "load")
MODEL = (
    "model.dim=256", "model.n_layers=6", "model.n_heads=4", "model.n_kv_heads=4", "model.ffn_dim=768",
    "model.vocab_size=2048", "train.seq_len=512", "train.global_batch_size=8", "optim.max_norm=1.0",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A way to train the model: its name and options."""

    ranks: int
    name: str
    options: tuple[str, ...]
    budget_bytes: float | None = None  # of the memory of a rank


def setting(ranks: int, mesh: str, policy: str, method: str = "auto") -> Setting:
    """Return the setting with a mesh, a policy of recomputation and a method of context parallelism."""
    options = [f"mesh.{axis}" for axis in mesh.split(" x ")]
    all_options = (*options, f"passes.remat.policy={policy}", f"passes.context.method={method}")
    return Setting(ranks, ", ".join([mesh, policy, *([method] if "cp" in mesh else [])]), all_options)


SETTINGS = (
    setting(1, "dp_shard=1", "none"),
    setting(1, "dp_shard=1", "selective"),
    setting(1, "dp_shard=1", "every_n"),
    setting(1, "dp_shard=1", "full"),
    setting(1, "dp_shard=1", "offload"),
    setting(2, "dp_shard=2", "selective"),
    setting(2, "dp_shard=2", "full"),
    setting(2, "dp_replicate=2 x dp_shard=1", "selective"),
    setting(2, "dp_shard=1 x tp=2", "selective"),
    setting(2, "dp_shard=1 x cp=2", "selective", "ring"),
    setting(2, "dp_shard=1 x cp=2", "full", "all_gather"),
    setting(4, "dp_shard=4", "selective"),
    setting(4, "dp_shard=2 x tp=2", "selective"),
    setting(4, "dp_shard=2 x cp=2", "full", "ring"),
    setting(4, "dp_shard=1 x cp=4", "selective", "ulysses"),
    setting(4, "dp_shard=1 x tp=4", "full"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the settings of `--ranks` ranks and print the table; exit with 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), help="none: only print the table of the file")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file of results, which is added to")
    parser.add_argument("--only", default="*", help="a pattern of settings, e.g. '*tp=2*'")
    parser.add_argument("--budgets", type=int, default=0, help="with --ranks 1: how many budgets of memory")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after an untimed one")
    parser.add_argument("--timeout-s", type=float, default=300)
    args = parser.parse_args(arguments)
    try:
        results = json.loads(args.out.read_text()) if args.out.exists() else []
        for result in compared(args) if args.ranks else ():
            results.append(result)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        Console(width=150).print(Markdown(report(results)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def compared(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every chosen setting, predicted and measured, on the machine as calibrated just before."""
    chosen = [s for s in SETTINGS if s.ranks == args.ranks and fnmatch.fnmatch(s.name, args.only)]
    if not chosen:
        raise UserError("--only", f"{args.only!r} names none of {', '.join(s.name for s in SETTINGS)}")
    if args.budgets and args.ranks != 1:
        raise UserError("--budgets", f"are for one rank, not {args.ranks}; set --ranks 1")
    cluster = measure(args.ranks, 1, args.clock)
    for chosen_setting in [*chosen, *budgets(args.budgets, cluster, args.backend)]:
        result, prediction = measured(chosen_setting, args), predicted(chosen_setting, cluster, args.backend)
        step_ms, events = prediction["predicted"]["step_ms"], prediction["timeline"]
        worked_ms = sum(event["end_ms"] - event["start_ms"] for event in events)
        result["predicted_ms"] = step_ms if args.clock == "wall" else worked_ms
        result["predicted_bytes"] = peak_bytes(prediction)
        yield result


def budgets(count: int, figures: dict[str, Any], backend: str) -> Iterator[Setting]:
    """Yield settings with budgets evenly spread between the predicted peaks of the policies `full` and `none`."""
    if count:
        usual = setting(1, "dp_shard=1", "budget")
        low, high = (
            peak_bytes(predicted(setting(1, "dp_shard=1", policy), figures, backend)) for policy in ("full", "none")
        )
    for i in range(count):
        size = low + (high - low) * (i + 1) / (count + 1)
        options = (*usual.options, f"passes.remat.budget_gib={size / GIB}", "passes.remat.headroom=0")
        yield Setting(1, f"{usual.name} {size / MIB:.1f} MiB", options, size)


def peak_bytes(prediction: dict[str, Any]) -> int:
    """Return the predicted peak of a rank's memory."""
    return prediction["prediction"]["memory"]["written_bytes"]


def measured(chosen: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a few steps of a setting, one thread a rank; raise UserError with its error if it fails."""
    job_args = argparse.Namespace(
        ranks=args.ranks,
        overrides=[*MODEL, *chosen.options, f"lower.backend={args.backend}"],
        rounds=1,
        steps=args.steps,
        threads=1,
        timeout_s=args.timeout_s,
    )
    with tempfile.TemporaryDirectory() as scratch:
        first, *rounds = Job("ours", args.ranks, job_args, Path(scratch, "job")).all()
    last = rounds[-1] if rounds else first
    if "error" in last:
        raise UserError(chosen.name, last["error"])
    figure = "step_ms" if args.clock == "wall" else "cpu_ms"
    print(f"{chosen.ranks} ranks, {chosen.name}: {last[figure]:,.0f} ms", file=sys.stderr)
    return {
        "ranks": args.ranks,
        "name": chosen.name,
        "backend": args.backend,
        "clock": args.clock,
        "measured_ms": last[figure],
        "measured_bytes": first["peak_bytes"],
        "budget_bytes": chosen.budget_bytes,
        "load": os.getloadavg()[0],
    }


def predicted(chosen: Setting, figures: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return the prediction of a dry run on the calibrated machine."""
    cfg = composed([*MODEL, *chosen.options, f"lower.backend={backend}"], chosen.ranks)
    cluster = build(ClusterConfig, options_of("here", figures))
    cfg = replace(cfg, cluster=cluster, passes=replace(cfg.passes, verify="none"))
    return predict_step(cfg, compile_dry(cfg, None))


# ---- the table ----------------------------------------------------------------------------------


def report(results: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown, and the errors."""
    results = medians(results)
    headings = ("ranks", "setting", "backend", "runs", "ms measured", "predicted", "MiB measured", "predicted", "load")
    times = [(r["predicted_ms"], r["measured_ms"]) for r in results]
    sizes = [(r["predicted_bytes"], r["measured_bytes"]) for r in results]
    errors = [statistics.median(abs(p / m - 1) for p, m in pairs) for pairs in (times, sizes)]
    summary = f"{len(results)} settings: median error of step time {errors[0]:.1%}, of peak memory {errors[1]:.2%}"
    last = f"{summary}; rank correlation of step times {rank_correlation(times):.2f}."
    return "\n".join([table(headings, map(line, results)), "", last, *picks(results)])


def medians(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a result for each setting: the median of its runs in every figure, and their number."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in ("ranks", "name", "backend", "clock")), []).append(result)
    return [
        runs[0] | {key: statistics.median(run[key] for run in runs) for key in FIGURES} | {"runs": len(runs)}
        for runs in groups.values()
    ]


def picks(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each number of ranks, backend and clock on the setting predicted to be fastest."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["ranks"], r["backend"], r["clock"]), []).append(r)
    for (ranks, *_), results_of_group in groups.items():
        pick = min(results_of_group, key=lambda r: r["predicted_ms"])
        best = min(results_of_group, key=lambda r: r["measured_ms"])
        off = pick["measured_ms"] / best["measured_ms"] - 1
        yield f"Of {ranks} ranks {pick['name']} is predicted to be fastest, {off:.1%} slower than the fastest measured."


def line(r: dict[str, Any]) -> list[str]:
    """Return the cells of a setting's row."""
    ms, size = r["predicted_ms"] / r["measured_ms"] - 1, r["predicted_bytes"] / r["measured_bytes"] - 1
    times = [f"{r['measured_ms']:,.0f}", f"{r['predicted_ms']:,.0f} ({ms:+.0%})"]
    sizes = [f"{r['measured_bytes'] / MIB:,.1f}", f"{r['predicted_bytes'] / MIB:,.1f} ({size:+.1%})"]
    clock = "" if r["clock"] == "wall" else f", {r['clock']}"
    over = " OVER" if r["measured_bytes"] > (r.get("budget_bytes") or r["measured_bytes"]) else ""
    names = [str(r["ranks"]), r["name"] + over, r["backend"] + clock, str(r["runs"])]
    return [*names, *times, *sizes, f"{r['load']:.1f}"]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation."""
    if len(pairs) < 2:
        return 1.0
    places = [[sorted(values).index(v) for v in values] for values in map(list, zip(*pairs, strict=True))]
    return statistics.correlation(*places)


if __name__ == "__main__":
    main()
