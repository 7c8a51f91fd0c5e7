"""Measure the speed of a run: throughput, FLOP/s, the share of the device's peak; and the peak memory of a step."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile  # torch.profiler would import the compiler

from compiler_trainer.config.device import CPU, device_name
from compiler_trainer.config.schema import Config
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.messages import messages
from compiler_trainer.step.step import Step
from compiler_trainer.step.turns import turns_of_step
from compiler_trainer.training.metrics import Record
from passes.ir import ir
from passes.torch_private import is_profiling


def speed(cfg: Config, flops_per_token: int, tokens: int, step_s: float) -> Record:
    """Return tokens/s of all ranks, TFLOP/s of one, and MFU if the device is the GPU that `cluster` describes.

    `tokens` are a step's tokens without padding. FLOPs are those that the model needs (`models/flops.py`), without
    recomputation. With images, images/s of all ranks: those that the tower computes.
    """
    flops_per_s = flops_per_token * tokens / mesh_of(cfg.mesh).world_size / step_s
    record = {"tokens_per_s": tokens / step_s, "step_ms": 1e3 * step_s, "tflops": flops_per_s / 1e12}
    if cfg.sees:
        record["images_per_s"] = cfg.train.global_batch_size * cfg.data.images_per_row / step_s
    if CPU != device_name() == cfg.cluster.device:
        record["mfu"] = flops_per_s / peak_flops(cfg)
    return record


def peak_flops(cfg: Config) -> float:
    """Return the peak FLOP/s of a `cluster` GPU in the dtype of computation, even if matmuls are in float8."""
    return 1e12 * getattr(cfg.cluster.peak_tflops, compute_dtype(cfg))


def compute_dtype(cfg: Config) -> str:
    return cfg.passes.cast.param_dtype or cfg.train.dtype


def sent_bytes(step: Step) -> dict[str, int]:
    """Return the bytes that a rank sends in a training step, by axis; with all stages here, those of the first."""
    turns = [turn for turn in step.training[0] if turn.rank == step.training[0][0].rank]
    last_pass = {record["program"]: record["accounting"] for record in step.report["passes"]}
    sent = Counter[str]()
    for turn in turns:
        for traffic in last_pass[turn.program]["traffic"]:
            sent[traffic["axis"]] += traffic["sent_bytes"]
    if step.schedule is not None:
        programs = {name: compiled.finished for name, compiled in step.train.items()}
        sizes = carried_bytes(programs)
        sending = messages(turns_of_step(programs, step.schedule, step.microbatches), programs)
        sent["pp"] += sum(sizes[message.key[0]] for message in sending if message.source == turns[0].rank)
    return dict(sent)


def carried_bytes(programs: Mapping[str, ir.Program]) -> dict[str, int]:
    """Return the bytes of the values that programs carry to each other, by name."""
    return {
        program_input.name: ir.example(node).nbytes
        for program in programs.values()
        for program_input, node in zip(program.inputs, program.placeholders(), strict=True)
        if program_input.kind == "carried"
    }


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


# ---- peak memory ---------------------------------------------------------------------------------------

T = TypeVar("T")


class PeakMemory:
    """The peak of live tensor bytes in a step of this process; `bytes` is 0 until a step is measured.

    On CUDA it is the allocator's own peak, reset each step. The CPU allocator keeps no count, but reports each
    allocation and release to the profiler, which gives the exact peak. A compiled step allocates the same each time, so
    one step is profiled and the others run at full speed. The persistent `state` is added on the CPU. Scratch space
    inside kernels is in neither figure.
    """

    def __init__(self, device: torch.device, state: Iterable[Tensor]):
        self.device = device
        self.state_bytes = sum(tensor.nbytes for tensor in state)
        self.bytes = 0

    def during(self, run: Callable[[], T]) -> T:
        """Call `run`, measure it, and return its result."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            result = run()
            self.bytes = torch.cuda.max_memory_allocated(self.device)
            return result
        if self.bytes or is_profiling():  # profilers must not be nested
            return run()
        result, peak = cpu_peak(run)
        self.bytes = self.state_bytes + peak if peak else 0  # on 0, measure the next step
        return result


def cpu_peak(run: Callable[[], T]) -> tuple[T, int]:
    """Return the result of `run`, and the most bytes of CPU tensors, allocated during it, that were alive at once.

    The count is 0 if a full disk did not take the profiler's file.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # at lower levels, the profiler prints to stderr
    with profile(profile_memory=True) as profiler:
        result = run()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            return result, highest(json.loads(trace.read_text())["traceEvents"])
    except (OSError, ValueError):  # the file is missing or truncated
        return result, 0


def highest(events: Iterable[dict]) -> int:
    """Return the peak of the running sum of the CPU memory events in a trace; a release has a negative size."""
    live = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        if event["args"]["Device Type"] == 0:
            live += event["args"]["Bytes"]
            peak = max(peak, live)
    return peak
