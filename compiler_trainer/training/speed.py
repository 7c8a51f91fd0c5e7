"""How fast a run is, and on what: throughput, FLOPs a second, their share of what the device could do."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from compiler_trainer.config.device import CPU, here
from compiler_trainer.config.schema import Config
from compiler_trainer.step.given import mesh_of
from compiler_trainer.training.metrics import Record


def speed(cfg: Config, flops_per_token: int, tokens: int, step_s: float) -> Record:
    """Tokens a second of all ranks, TFLOP/s of one, and MFU where the device is the GPU that `cluster` describes.

    `tokens` are those of a step that are no padding. FLOPs are those that the model needs (`models/flops.py`), whatever
    is recomputed.
    """
    flops_per_s = flops_per_token * tokens / mesh_of(cfg.mesh).world_size / step_s
    found = {"tokens_per_s": tokens / step_s, "step_ms": 1e3 * step_s, "tflops": flops_per_s / 1e12}
    if CPU != here() == cfg.cluster.device:
        found["mfu"] = flops_per_s / peak_flops(cfg)
    return found


def peak_flops(cfg: Config) -> float:
    """FLOP/s of a GPU of `cluster` in the dtype of computation, whether products are in float8 or not."""
    return 1e12 * getattr(cfg.cluster.peak_tflops, computes_in(cfg))


def computes_in(cfg: Config) -> str:
    """The dtype of computation."""
    return cfg.passes.cast.param_dtype or cfg.train.dtype


def machine() -> dict[str, str]:
    """What this process runs on: its device, and the versions that count."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    count = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))  # a rank sees one of them
    gpu = f"{count} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none"
    return {
        "processor": f"{processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "GPU": gpu,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
    }


def processor() -> str:
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
