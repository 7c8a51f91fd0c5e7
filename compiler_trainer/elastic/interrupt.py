"""Make the main thread leave a round that is over, because a rank is gone.

With gloo it fails when a connection closes. With NCCL it waits for kernels that wait for the lost rank, until another
thread aborts them. An abort frees what the launch of a collective uses, so only a main thread that waits elsewhere is
interrupted. One that does not leave the round within `GRACE_S` waits where nothing can wake it, or compiles for a mesh
that is gone: its process starts again in place. One that launches a collective after NCCL has noticed the loss ends
with SIGABRT, because PyTorch throws in a destructor (`AutoNcclGroup`); the launcher replaces it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist

from compiler_trainer.step.ranks import cut_off
from passes.torch_private import OpOverload

POLL_S = 0.05
STILL_S = 0.5  # in one place, after which a thread waits and does not launch one kernel after another
GRACE_S = 10.0 if torch.version.cuda else 3.0
COLLECTIVES = ("_c10d_functional", "c10d")  # namespaces of operators


def interrupt(thread: int, has_left: threading.Event, start_again: Callable[[], object]) -> None:
    """Let a thread leave the round, and call `start_again` if it has not left in time."""
    end, place, since = time.monotonic() + GRACE_S, None, 0.0
    is_aborting = False
    while not has_left.wait(POLL_S):
        now, stack = time.monotonic(), list(frames(thread))
        if now > end:
            start_again()
            return
        if (here := [(id(frame.f_code), frame.f_lasti) for frame in stack]) != place:
            place, since = here, now
        elif now - since > STILL_S and not is_aborting and not any(map(is_collective, stack)):
            is_aborting = True
            abort = threading.Thread(target=cut_off, args=[dist.group.WORLD], daemon=True, name="abort")
            abort.start()  # it may wait for the main thread


def frames(thread: int) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_collective(frame: FrameType) -> bool:
    """Return True if a frame calls a collective."""
    called = frame.f_locals.get("self")
    is_operator = isinstance(called, OpOverload) and called.namespace in COLLECTIVES
    return is_operator or "torch/distributed/" in frame.f_code.co_filename
