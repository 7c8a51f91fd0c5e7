"""Recognize out-of-memory errors of training, with the operation that failed and the memory in use."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from compiler_trainer.training.watch import operation_of
from passes.lower.heap import free_in_heap
from passes.program.ir import CompileError

SAID = re.compile(r"out of memory|can't allocate memory|std::bad_alloc", re.IGNORECASE)  # in messages of RuntimeError
ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
STATUS = Path("/proc/self/status")


class Failure(NamedTuple):
    """A failed allocation: its size (0 bytes if unknown), the operation, and the bytes that were in use."""

    asked_bytes: int
    where: str
    used_bytes: int


def failure_of(error: BaseException) -> Failure | None:
    """Return the failed allocation behind an error, or None if the error has another cause."""
    errors = list(chain(error))
    if not any(map(is_of_memory, errors)):
        return None
    match = next((m for e in errors if (m := ASKED.search(str(e)))), None)
    size = round(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    node = next((e.node for e in errors if isinstance(e, CompileError) and e.node), None)
    operation = f"%{node.name}" if node else operation_at(errors[-1].__traceback__)
    return Failure(size, operation, used_bytes())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the original error last."""
    visited = set[int]()  # causes may form a cycle
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def is_of_memory(error: BaseException) -> bool:
    """Return True if this error itself, apart from its causes, is a failed allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(SAID.search(str(error)))


def operation_at(traceback: TracebackType | None) -> str:
    """Return the operation that the innermost frame of a traceback ran when the error was raised."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return operation_of(traceback.tb_frame, traceback.tb_lineno) if traceback else "an allocation"


# ---- how much there is ------------------------------------------------------------------------------------


def used_bytes() -> int:
    """Return the bytes in use: on CUDA the peak of tensors; on a CPU the address space if limited, or resident memory.

    Memory that the CPU heap caches (`passes/lower/heap.py`) is not counted.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return max(0, status_bytes("VmSize" if limit_bytes() else "VmRSS") - free_in_heap())


def let_go() -> None:
    """Release unreferenced and cached memory, and reset CUDA's peak statistics."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def free_bytes() -> int:
    """Return the bytes that can still be allocated on the device, or in this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    if limit := limit_bytes():
        return max(0, limit - used_bytes())
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    available_bytes = 1024 * int(available.split()[1]) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return available_bytes + free_in_heap()


def limit_bytes() -> int:
    """Return the limit of this process's address space (ulimit -v), or 0 if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def status_bytes(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
