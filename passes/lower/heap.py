"""The heap of a process that trains on the CPU: a step gets the memory that the one before it freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
FIGURES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of giving it back and asking anew, page by page, in every step.

    It holds for the whole process, whose peak of resident memory stays. Elsewhere than on glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)  # never trim the top
        mallopt(M_MMAP_MAX, 0)  # large blocks lie in the heap, too


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIGURES]


def free_in_heap() -> int:
    """Bytes that the process has and allocates no memory in; 0 elsewhere than on glibc 2.33 and later."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Mallinfo
    return mallinfo().fordblks
