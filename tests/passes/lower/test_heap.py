"""Memory that one step frees is reused by the next, without asking the kernel for it page by page."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

COUNT = """
import resource, sys, torch
from passes.lower.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    held = [torch.ones(n << 20) for n in (1, 20, 3)]
for _ in range(5):  # until the heap is as large as it gets
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's malloc only")
@pytest.mark.full
def test_no_page_is_asked_for_twice():
    requested, saved = (int(subprocess.check_output([sys.executable, "-c", COUNT, options])) for options in ("asked", "kept"))
    pages_of_a_step = 24 * 4 * 256
    assert requested > 2 * pages_of_a_step  # this happens by default
    assert saved < pages_of_a_step / 10
