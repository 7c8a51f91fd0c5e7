"""Let PyTorch's CPU build trace for CUDA: a small library (`trace_cuda.cpp`) is loaded before it."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from pathlib import Path

import torch

from passes.ir import ir
from passes.torch_private import compiler_folder

SOURCE = Path(__file__).with_suffix(".cpp")


def is_possible() -> bool:
    """Return True if this process can trace for CUDA: it has a GPU, or the library."""
    return torch.cuda.is_available() or place().name in os.environ.get("LD_PRELOAD", "")


def place() -> Path:
    """Return the path of the library for this build of PyTorch."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()
    return compiler_folder() / "trace_cuda" / f"{digest[:20]}.so"


def library() -> Path:
    """Return the library's path, after building it if needed; raises Refused with the compiler's message."""
    path = place()
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        result = subprocess.run([*command(), "-o", str(part)], capture_output=True, text=True)
        if result.returncode:
            raise ir.Refused("trace_cuda", None, f"a C++ compiler is needed: {result.stderr[-2000:]}")
        os.replace(part, path)
    return path


def command() -> list[str]:
    """Return the compiler's command line."""
    home = Path(torch.__file__).parent
    include, lib = home / "include", home / "lib"
    flags = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    return [*compiler, "-std=c++20", "-shared", "-fPIC", str(SOURCE), *flags, "-ltorch_cpu", "-lc10"]
