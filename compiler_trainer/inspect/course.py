"""The course of a run: its metrics along the steps, its machine, and its time of compilation."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from compiler_trainer.config.compose import default_job
from compiler_trainer.config.options import flat
from compiler_trainer.config.targets import name_of
from compiler_trainer.inspect.balance import spans_of
from compiler_trainer.inspect.dumps import Run
from compiler_trainer.step.effects import effect_lines

METRICS = {  # metric -> its name and unit
    "loss": ("Training loss", "nats per token"),
    "eval_loss": ("Validation loss", "nats per token"),
    "tokens_per_s": ("Throughput of all ranks", "tokens/s"),
    "tflops": ("Model FLOPs of a rank, without recomputation", "TFLOP/s"),
    "mfu": ("MFU: model FLOPs over the GPU's peak", "%"),
    "step_ms": ("Time of a step", "ms"),
    "data_ms": ("Time waiting for data in a step", "ms"),
    "wait_share": ("Share of a step in which ranks wait for each other, mean", "%"),
    "busy_ms_max": ("Working time in a step, slowest rank", "ms"),
    "busy_ms_median": ("Working time in a step, median rank", "ms"),
    "grad_norm": ("Gradient norm before clipping", ""),
    "lr": ("Learning rate", ""),
    "peak_mem_bytes": ("Peak memory of a rank", "bytes"),
}


@dataclasses.dataclass(frozen=True)
class Course:
    """The metrics of a run as (step, value) points, means of spans if there are many steps; facts as (name, value)."""

    curves: dict[str, list[tuple[int, float]]]
    names: dict[str, tuple[str, str]]
    facts: list[tuple[str, str]]
    seconds: list[tuple[str, float]]
    changed: list[tuple[str, Any]]


def course(run: Run) -> Course:
    """Return the course of a run. A dry run has no metrics."""
    curves = {name: curve(run.metrics, name) for name in METRICS}
    return Course(
        {name: points for name, points in curves.items() if points},
        METRICS,
        list(facts(run).items()),
        seconds(run.report.get("seconds", {})),
        changed(run.config),
    )


def curve(records: Sequence[Mapping[str, float]], name: str) -> list[tuple[int, float]]:
    """Return the points of one metric, at most `SPANS`, each at the last step of its span."""
    points = [(int(record["step"]), record[name]) for record in records if name in record]
    return [(points[b - 1][0], statistics.fmean(value for _, value in points[a:b])) for a, b in spans_of(len(points))]


def facts(run: Run) -> dict[str, str]:
    """Return an overview of a run: model, batch, data, progress, throughput and machine."""
    model, train = run.config.get("model", {}), run.config.get("train", {})
    overview = {"model": name_of(model) if "_target_" in model else str(model.get("name", "your own"))}
    if run.trained:
        stage = run.trained[-1]
        shapes = [n.shape for n in stage.nodes if n.op == "parameter"]
        overview["parameters on a rank"] = f"{sum(map(math.prod, shapes)):,} in {len(shapes)} tensors"
    rows, length = train.get("global_batch_size"), train.get("seq_len")
    if rows and length:
        overview["batch"] = f"{rows:,} sequences of {length:,} tokens, {rows * length:,} tokens a step"
    overview |= {f"packing of {part['source']}": packing(part) for part in run.report.get("data", ())}
    overview |= dict(line.split(": ", 1) for line in effect_lines(run.report))
    overview["dtype"] = str(train.get("dtype", ""))
    if run.metrics:
        last, speeds = run.metrics[-1], [record["tokens_per_s"] for record in run.metrics if "tokens_per_s" in record]
        overview["steps done"] = f"{int(last['step']):,}" + (f" of {train['steps']:,}" if "steps" in train else "")
        overview["tokens seen"] = f"{int(last.get('tokens', 0)):,}"
        if speeds:
            overview["throughput"] = f"{statistics.median(speeds):,.0f} tokens/s (median)"
    return {**overview, **{key: str(value) for key, value in run.report.get("machine", {}).items()}}


def packing(part: Mapping[str, Any]) -> str:
    """Return a description of the packing of a source."""
    return f"{part['rows']:,} sequences, {part['padding']:.2%} padding, {part['cut']:.1%} of documents cut"


def seconds(by_pass: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the seconds of compilation: capture, the passes of each program, and its kernels."""
    sums: dict[str, float] = {}
    for name, value in by_pass.items():
        program, _, step = name.partition(".")
        label = f"{'kernels' if step == 'lower' else 'passes'} of {program}" if step else name
        sums[label] = sums.get(label, 0.0) + value
    return list(sums.items())


def changed(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the options that differ from the default job, without values that the run determined itself."""
    defaults = flat(default_job())
    return [
        (name, plain(value))
        for name, value in flat(config).items()
        if not is_found(name, value) and (name not in defaults or alike(defaults[name]) != alike(value))
    ]


def is_found(name: str, value: Any) -> bool:
    """Return True if a run determined the option itself: its folder, the machine, an axis of one rank."""
    return name == "run.dir" or name.startswith("cluster.") or (name.startswith("mesh.") and value == 1)


def alike(value: Any) -> Any:
    """Return sequences of any kind as lists."""
    return list(value) if isinstance(value, (list, tuple)) else value


def plain(value: Any) -> Any:
    """Return a value that JSON can hold, as text if necessary."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
