"""The row of a point: its overrides, the results in its run folder, and its environment."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from compiler_trainer.config.options import flat
from compiler_trainer.training import metrics

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "torchao", "triton", "numpy")


def parsed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides as options and values: `+a.b=[1,2]` as {"a.b": [1, 2]}, a table by its entries, no `~a`.

    A value of null is the text "null": a point without the override has none.
    """
    values: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_delete():
            values |= flat({override.key_or_group.replace("/", "."): override.value()})
    return {name: "null" if value is None else value for name, value in values.items()}


def measured(folder: Path) -> dict[str, Any]:
    """Return the results in a run folder so far: last and best losses, medians over steps, compilation, traffic."""
    records = metrics.read(folder / metrics.FILE) if (folder / metrics.FILE).exists() else []
    report = folder / "report.json"
    return {**of_steps(records), **(of_report(json.loads(report.read_text())) if report.exists() else {})}


def of_steps(records: Sequence[metrics.Record]) -> dict[str, Any]:
    """Return losses over all steps, and times without the first step, which is profiled and loads kernels."""
    if not records:
        return {}
    losses = [r["loss"] for r in records if "loss" in r]  # a step with a skipped update may have none
    held_out = [r["eval_loss"] for r in records if "eval_loss" in r]
    timed = records[1:] or records
    return {
        "steps": int(records[-1]["step"]),
        "loss": losses[-1] if losses else None,
        "best_loss": min(losses, default=None),
        "eval_loss": held_out[-1] if held_out else None,
        "best_eval_loss": min(held_out, default=None),
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in timed),
        "step_ms": statistics.median(r["step_ms"] for r in timed),
        "peak_mem_bytes": int(max(r["peak_mem_bytes"] for r in records)),
    }


def of_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of compilation, bytes that a rank sends in a step by axis, and the prediction."""
    sent = report.get("sent_bytes", {})  # absent if compilation failed
    wire = {f"wire_bytes.{axis}": count for axis, count in sorted(sent.items())}
    predicted = flat({"predicted": report["predicted"]}) if "predicted" in report else {}
    compile_s = round(sum(report.get("seconds", {}).values()), 3)
    return {"compile_s": compile_s, "wire_bytes": sum(sent.values()), **wire, **predicted}


@functools.cache
def environment() -> dict[str, Any]:
    """Return versions, machine and commit."""
    return {
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": os.cpu_count(),
        "host": platform.node(),
        "commit": commit(),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the sources, with `+` if files differ from it; None outside a git clone."""
    if not (ROOT / ".git").exists():
        return None
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    head, changed = git(["git", "rev-parse", "HEAD"]), git(["git", "status", "--porcelain", "-uno"])
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None
