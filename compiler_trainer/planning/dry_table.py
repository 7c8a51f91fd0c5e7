"""The console output of a dry run."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from compiler_trainer.config.schema import Config
from compiler_trainer.planning.error import error_bar


def show(cfg: Config, report: dict[str, Any]) -> None:
    """Print the prediction as tables: speed, memory, communication, and the figures of the cluster."""
    console = Console(file=sys.stdout)
    for table in (speed(report), memory(cfg, report), communication(report), stated(cfg)):
        if table.rows:
            console.print(table)
    if "pipeline" in report["prediction"]:
        console.print(stages(report["prediction"]["pipeline"]))
    if error := error_bar(cfg):
        console.print(error, soft_wrap=True)


def stages(report: dict[str, Any]) -> str:
    """Return the pipeline in one line."""
    busy, sizes = report["busy_ms"], [each["device_bytes"] for each in report["memory"]]
    busiest, largest = busy.index(max(busy)), sizes.index(max(sizes))
    extremes = (
        f"busiest rank {busiest}, {busy[busiest]:,.1f} ms; largest rank {largest}, {sizes[largest] / 2**30:,.2f} GiB"
    )
    stages = len(report["ranks_of_stages"])
    return (
        f"pipeline: {report['schedule']}, {stages} stages on {len(busy)} ranks, idle {report['idle']:.1%}; {extremes}"
    )


def speed(report: dict[str, Any]) -> Table:
    """Return a table of time and throughput, and of the parts of a step's time."""
    table = Table("", "a rank", title="step")
    predicted, prediction = report["predicted"], report["prediction"]
    table.add_row("step, ms", f"{predicted['step_ms']:,.1f}")
    table.add_row("tokens/s/GPU", f"{predicted['tokens_per_s_per_gpu']:,.0f}")
    table.add_row("MFU", f"{predicted['mfu']:.1%}")
    table.add_row("computing, ms", f"{prediction['compute_ms']:,.1f}")
    table.add_row("  of it, slowed by collectives", f"{prediction['slowed_ms']:,.1f}")
    table.add_row("waiting for launches, ms", f"{prediction['launch_ms']:,.1f}")
    for axis in prediction["sent_bytes"]:
        table.add_row(f"waiting for {axis}, ms", f"{prediction['exposed_ms'].get(axis, 0):,.1f}")
    return table


def memory(cfg: Config, report: dict[str, Any]) -> Table:
    """Return a table of the bytes alive at the peak."""
    peak = report["prediction"]["memory"]
    verdict = "fits" if peak["fits"] else "DOES NOT FIT"
    unit, scale = ("GiB", 2**30) if peak["bytes"] >= 2**30 else ("MiB", 2**20)
    table = Table("at the peak", f"{unit} a rank", title=f"memory: {verdict} {cfg.cluster.hbm_gib:g} GiB")
    for kind, size in sorted(peak["kinds"].items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{size / scale:,.2f}")
    table.add_section()
    table.add_row(f"alive, at %{peak['node']} ({peak['line']})", f"{peak['bytes'] / scale:,.2f}")
    for kind, size in peak["beside"].items():
        table.add_row(kind, f"{size / scale:,.2f}")
    table.add_section()
    table.add_row("on the device", f"{peak['device_bytes'] / scale:,.2f}")
    return table


def communication(report: dict[str, Any]) -> Table:
    """Return a table of the bytes that a rank sends in a step."""
    table = Table("axis", "in its node", "to other nodes", title="sent by a rank")
    for axis, links in report["prediction"]["sent_bytes"].items():
        table.add_row(axis, decimal(links["intra"]), decimal(links["inter"]))
    return table


def stated(cfg: Config) -> Table:
    """Return a table of the cluster's figures that the prediction uses, with their sources."""
    table = Table("figure", "", "from", title=f"taken of {cfg.cluster.name}")
    for name, source in cfg.cluster.sources.items():
        value = getattr(cfg.cluster, name)
        text = f"{value:g}" if isinstance(value, float) else value
        table.add_row(name, text if isinstance(text, str) else "", source)
    return table
