"""Make the main thread leave a round that is over, because a rank is gone.

With gloo it fails when a connection closes. With NCCL it waits for kernels that wait for the lost rank, until another
thread aborts them. One that does not leave the round within `GRACE_S` waits where nothing can wake it, or compiles for
a mesh that is gone: its process starts again in place. One that launches a collective after NCCL has noticed the loss
ends with SIGABRT, because PyTorch throws in a destructor (`AutoNcclGroup`); the launcher replaces it.

The stack of the main thread is not read: while it captures a model, that keeps values alive for which PyTorch then
loses the node, so that the capture fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from compiler_trainer.step.ranks import abort_wait

POLL_S = 0.05
GRACE_S = 10.0 if torch.version.cuda else 3.0


def interrupt(has_left: threading.Event, start_again: Callable[[], object]) -> None:
    """Let the main thread leave the round, and call `start_again` if it has not left in time."""
    end = time.monotonic() + GRACE_S
    abort = threading.Thread(target=abort_wait, args=[has_left], daemon=True, name="abort")
    abort.start()  # it may wait for the main thread
    while not has_left.wait(POLL_S):
        if time.monotonic() > end:
            start_again()
            return
