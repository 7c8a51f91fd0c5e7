"""Measure this machine and write it as a cluster.

Every rank measures at the same time, so that cores, memory and links are shared as in a run with as many ranks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import yaml
from rich.console import Console
from rich.table import Table

from compiler_trainer.calibrate.probes import Measurements, Probes, free_port, leave_group
from compiler_trainer.config.device import device_name
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import write_atomically
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import ClusterConfig
from compiler_trainer.training.folder import check_writable
from compiler_trainer.training.speed import machine

GIB = 2**30
NOT_MEASURED = "not measured"


def calibrate(out: Path, ranks: int, threads: int, clock: str) -> None:
    """Measure, print a table, write the file; raise UserError on bad input."""
    if ranks < 1 or threads < 1:
        raise UserError("--ranks, --threads", "must be at least 1")
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise UserError("--ranks", f"there are {torch.cuda.device_count()} GPUs for {ranks} ranks")
    if clock == "cpu" and (threads > 1 or torch.cuda.is_available()):
        problem = "is cpu, which adds up the time of all threads and leaves out that of a GPU"
        raise UserError("--clock", f"{problem}; take --clock wall, or on a CPU --threads 1")
    if out.suffix != ".yaml" or out.is_dir():
        raise UserError("--out", f"{out} is no name of a YAML file; end it with .yaml, as in FOLDER/cluster/NAME.yaml")
    check_writable("--out", out.parent)
    began = time.perf_counter()
    figures = measure(ranks, threads, clock)
    options = options_of(out.stem, figures)
    build(ClusterConfig, options, str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(options, sort_keys=False, width=120, default_flow_style=None)
    write_atomically(out, heading(ranks, threads, figures) + text)
    show(figures)
    guessed = [name for name, source in options["sources"].items() if source == NOT_MEASURED]
    print(f"not measured: {', '.join(guessed)}; correct them in the file")
    print(f"{out}: {ranks} ranks, measured in {time.perf_counter() - began:.0f} s")


def measure(ranks: int, threads: int, clock: str = "wall") -> Measurements:
    """Return rank 0's measurements, with all ranks measuring."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    manager = mp.Manager()
    results = manager.dict()
    mp.spawn(probe, (ranks, threads, clock, results, free_port()), nprocs=ranks)
    return dict(results)


def probe(rank: int, ranks: int, threads: int, clock: str, results: Any, port: int) -> None:
    """Measure on one of the ranks."""
    probes = Probes(rank, ranks, threads, port, clock)
    figures = probes.measure_all()
    if rank == 0:
        results.update(figures)
    leave_group()


def options_of(name: str, figures: Measurements) -> dict[str, Any]:
    """Return the measured figures as options of a cluster."""
    fast = {dtype: max(rate for _, rate in points) for dtype, points in figures["products"].items()}
    bandwidth = max(rate for _, rate in figures["memory"])
    link_gb_s = figures.get("link_gb_s", 1.0)
    source = f"measured: compiler-trainer calibrate, {figures['at']}, load average {figures['load']:.1f} before"
    return {
        "name": name,
        "device": device_name(),
        "gpus_per_node": torch.cuda.device_count() if figures["device"] == "cuda" else 64,
        "peak_tflops": fast | {"float8": fast.get("float8", fast["bfloat16"])},
        "attention": "measured",
        "throttle": 1.0,
        "kernel_us": figures["kernel_us"],
        "launch_us": figures["launch_us"],
        "operator_us": figures["operator_us"],
        "host_computes": figures["device"] == "cpu",
        "hbm_gib": figures["memory_gib"],
        "hbm_gb_s": bandwidth,
        "intra_gb_s": link_gb_s,
        "inter_gb_s": link_gb_s,
        "beside_computing": figures["beside"][0],
        "beside_moving": figures["beside"][1],
        "beside_sending": figures["beside"][2],
        "context_gib": 0.0,
        "communicator_gib": 0.0,
        "allocator_loss": 0.0,
        "expert_load": 1.0,
        "sources": {
            "rates": source,
            "kernel_us": source,
            "beside_computing": source,
            "context_gib": NOT_MEASURED,
            "intra_gb_s": source if "link_gb_s" in figures else NOT_MEASURED,
            "inter_gb_s": NOT_MEASURED,
        },
        "rates": {
            "products": {
                **figures["products"],
                "float8": figures["products"].get("float8", figures["products"]["bfloat16"]),
                "grouped": figures["products"]["float32" if figures["device"] == "cpu" else "bfloat16"],
            },
            "attention": [{"kernel": "measured", **figures["attention"]}],
            "memory": [[mib, round(rate / bandwidth, 4)] for mib, rate in figures["memory"]],
            "collectives": figures["collectives"],
            "protocols": [{"base_us": figures["kernel_us"], "intra_us": 0.0, "inter_us": 0.0, "share": 1.0}],
        },
    }


def heading(ranks: int, threads: int, measured: Measurements) -> str:
    """Return the comment at the top of the file."""
    facts = machine()
    return (
        f"# Measured by compiler-trainer calibrate with {ranks} ranks at once, {threads} threads each, "
        f"{measured['at']}:\n"
        f"# {facts['processor']}; GPU: {facts['GPU']}; {facts['versions']}.\n"
        "# Sizes: GFLOP of products, keys of attention, MiB of memory and collectives. Grouped products are taken\n"
        "# to be as quick as others, float8 as bfloat16.\n"
    )


def show(figures: Measurements) -> None:
    """Print the measurements."""
    table = Table("what", "size: figure", title=f"measured, {figures['device']}")
    for dtype, points in figures["products"].items():
        table.add_row(f"matmuls {dtype}, TFLOP/s by GFLOP", line(points))
    for way, points in figures["attention"].items():
        table.add_row(f"attention {way}, TFLOP/s by keys", line(points))
    table.add_row("memory, GB/s by MiB moved", line(figures["memory"]))
    latencies = [f"{figures[name]:g}" for name in ("kernel_us", "launch_us", "operator_us")]
    table.add_row("smallest kernel, launch, operator of the eager backend, us", ", ".join(latencies))
    for times in figures["collectives"]:
        table.add_row(f"{times['kind']} of {times['ranks']}, us by MiB", line(times["us"]))
    table.add_row("kept during a collective: matmuls, memory", f"{figures['beside'][0]:g}, {figures['beside'][1]:g}")
    table.add_row("a collective keeps during matmuls", f"{figures['beside'][2]:g}")
    Console().print(table)


def line(points: Any) -> str:
    """Return a curve in one line."""
    return "  ".join(f"{size:g}: {figure:g}" for size, figure in points)
