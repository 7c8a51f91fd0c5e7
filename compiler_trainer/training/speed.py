"""Measure the speed of a run: throughput, FLOP/s, and the share of the device's peak."""

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
    """Return tokens/s of all ranks, TFLOP/s of one, and MFU if the device is the GPU that `cluster` describes.

    `tokens` are a step's tokens without padding. FLOPs are those that the model needs (`models/flops.py`), without
    recomputation.
    """
    flops_per_s = flops_per_token * tokens / mesh_of(cfg.mesh).world_size / step_s
    record = {"tokens_per_s": tokens / step_s, "step_ms": 1e3 * step_s, "tflops": flops_per_s / 1e12}
    if CPU != here() == cfg.cluster.device:
        record["mfu"] = flops_per_s / peak_flops(cfg)
    return record


def peak_flops(cfg: Config) -> float:
    """Return the peak FLOP/s of a `cluster` GPU in the dtype of computation, even if matmuls are in float8."""
    return 1e12 * getattr(cfg.cluster.peak_tflops, computes_in(cfg))


def computes_in(cfg: Config) -> str:
    return cfg.passes.cast.param_dtype or cfg.train.dtype


def machine() -> dict[str, str]:
    """Return a description of this machine: processor, GPUs, and relevant versions."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    count = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))  # a rank sees only one GPU
    gpu = f"{count} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none"
    return {
        "processor": f"{processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "GPU": gpu,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}",
    }


def processor() -> str:
    """Return the name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
