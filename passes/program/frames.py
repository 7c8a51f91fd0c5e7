"""Room for Python's frames and objects: what keeps the time of tracing proportional to the size of the model."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)
ALLOCATIONS = 200_000  # between two searches for garbage; Python's own 700 is for programs with few objects
SLOTS = 1 << 16  # 512 KiB: the chunk that holds such a frame is rounded up to 1 MiB, half of it free


def roomy(fn: F) -> F:
    """The function, called so that all frames below it lie in one chunk of memory, and garbage is searched for seldom.

    CPython 3.11 and later keep frames in chunks of 16 KiB and map a new one when a call does not fit. A hot call at
    the end of a chunk maps and unmaps memory each time; at which depth depends on the size of the model. A
    frame that says it needs more gets a larger chunk (`_PyThreadState_PushFrame`), in which its callees have room.

    A graph is a million objects that refer to each other in circles. Searching them for garbage is a tenth of the time.
    """

    @functools.wraps(fn)
    def call(*args, **kwargs):
        usual = gc.get_threshold()
        gc.set_threshold(ALLOCATIONS, *usual[1:])
        try:
            return fn(*args, **kwargs)
        finally:
            gc.set_threshold(*usual)

    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
