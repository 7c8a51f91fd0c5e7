"""An absent H100: PyTorch's CPU build traces for it, Inductor writes Triton for it, Triton compiles to cubin.

Run as a program with the built `trace_cuda.cpp` and a config as JSON, it compiles the bodies of that job's programs and
prints its counts as JSON. It is a program because the library has to be loaded before PyTorch.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from compiler_trainer import models
from compiler_trainer.config.device import passes_on
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config, LowerConfig
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.pipeline import DTYPES
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import Captured, mesh_of
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.runtime import ProcessRanks
from passes.ir.bodies import calls_of
from passes.lower.host_reads import find_breaks
from passes.lower.inductor import compile_body
from passes.lower.store import Store
from passes.torch_private import compile_inner, from_torch

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="fake",
)
SHOWN = {  # properties of CUDA that PyTorch queries in Python
    "get_device_properties": lambda device=None: H100,
    "get_device_capability": lambda device=None: (H100.major, H100.minor),
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_bf16_supported": lambda *_, **__: True,
    "synchronize": lambda *_: None,
}
EXTERN = ("attention", "_scaled_mm", "grouped_mm")  # operators with their own CUDA kernels, by name


class Driver:
    """The driver that Triton queries for the device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


@contextlib.contextmanager
def fake_h100() -> Iterator[list[CachingAutotuner]]:
    """Let Inductor compile for an H100; yield the kernels that Triton has compiled, which are not loaded."""
    kernels: list[CachingAutotuner] = []
    driver.set_active(Driver())
    has_triton.cache_clear()
    with contextlib.ExitStack() as on:
        for name, value in SHOWN.items():
            on.enter_context(patch.object(torch.cuda, name, value))
            for asked in (CudaInterface, CudaInterface.Worker):
                if hasattr(asked, name):
                    on.enter_context(patch.object(asked, name, staticmethod(value)))
        on.enter_context(patch.object(CudaInterface, "is_available", staticmethod(lambda: True)))
        on.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        on.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        on.enter_context(patch.object(CachingAutotuner, "_make_launchers", lambda kernel: kernels.append(kernel)))
        on.enter_context(patch.object(CachingAutotuner, "_dynamic_scale_rblock", lambda kernel: None))
        on.enter_context(config.patch(compile_threads=1, use_static_triton_launcher=False))
        yield kernels


def programs_of(cfg: Config) -> dict[str, Captured]:
    """Return a job's training programs on CUDA, as bodies, of all stages; process groups exist but send nothing."""
    mesh = mesh_of(cfg.mesh)
    model = models.build(cfg.model, DTYPES[cfg.train.dtype])
    microbatches = cfg.train.microbatches
    shape = (cfg.train.global_batch_size // microbatches, cfg.train.seq_len)
    batch = {key: torch.empty(shape, dtype=torch.int64, device="meta") for key in models.INPUTS}
    request = CompileRequest(
        model=model,
        loss_fn=models.loss_fn,
        batch=batch,
        mesh=mesh,
        passes=passes_on(cfg.passes, on_gpu=True),
        optim=cfg.optim,
        device=torch.device("cuda"),
        cluster=cfg.cluster,
        microbatches=microbatches,
        evaluate=False,
    )
    programs = compile_programs(request).programs
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.world_size)
    ranks = ProcessRanks(mesh, LowerConfig(), torch.device("cuda"), lambda what: None)
    for program, _ in programs.values():
        ranks.make_groups(program)
    ranks.name_groups()
    return programs


def is_flex(kernel: CachingAutotuner, backward: bool) -> bool:
    """Return True if Triton's kernel is FlexAttention's forward, or its backward."""
    return "arg_KV_IDX" in kernel.fn.arg_names and ("arg_DO" in kernel.fn.arg_names) == backward


def compile_all(programs: dict[str, Captured]) -> dict[str, Any]:
    """Compile every body for an H100; return the inputs and results of compilation."""
    extern, squares = Counter[str](), set[tuple[int, ...]]()

    def watched(module: torch.fx.GraphModule, *given: Any) -> Any:
        shapes = [value.shape for node in module.graph.nodes if isinstance(value := from_torch(node).value, torch.Tensor)]
        squares.update(tuple(shape) for shape in shapes if len(shape) > 1 and shape[-1] == shape[-2])
        return compile_inner(module, *given)

    watching = patch("passes.lower.inductor.compile_inner", watched)
    with fake_h100() as kernels, tempfile.TemporaryDirectory() as folder, watching:
        bodies = [(body, ctx) for program, ctx in programs.values() for body in calls_of(program)]
        for body, ctx in bodies:
            print(f"{body.name}, {len(kernels)} kernels before it", file=sys.stderr, flush=True)
            compile_body(body, ctx, Store(Path(folder)), fast=False)
            extern.update(str(node.target) for node in body.graph.nodes if any(e in str(node.target) for e in EXTERN))
    made = [result.kernel.asm for kernel in kernels for result in kernel.compile_results]
    targets = sorted({line for asm in made for line in asm["ptx"].splitlines() if line.startswith(".target")})
    sizes = [len(asm["cubin"]) for asm in made]
    shared = max(result.kernel.metadata.shared for kernel in kernels for result in kernel.compile_results)
    flex = [sum(is_flex(kernel, backward) for kernel in kernels) for backward in (False, True)]
    found = {"bodies": len(bodies), "kernels": len(kernels), "cubins": sizes, "targets": targets, "extern": extern}
    found |= {"flex": flex, "shared": shared, "squares": sorted(squares)}
    return found | {"breaks": [str(each) for program, _ in programs.values() for each in find_breaks(program)]}


if __name__ == "__main__":
    job = build(Config, json.loads(sys.argv[2]))
    print(json.dumps(compile_all(programs_of(validate(job, dry_world_size(job))))))
