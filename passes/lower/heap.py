"""The heap of a process that trains on the CPU: a step reuses the memory that the step before it freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
FIGURES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it and mapping it again, page by page, in every step.

    This applies to the whole process, whose resident memory stays at its peak. Without glibc nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)  # never trim the top
        mallopt(M_MMAP_MAX, 0)  # allocate large blocks in the heap, too


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIGURES]


def free_in_heap() -> int:
    """Return the bytes that the process holds without using them; 0 without glibc 2.33 or later."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Mallinfo
    return mallinfo().fordblks
