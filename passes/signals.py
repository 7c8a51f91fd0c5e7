"""Protect compiler processes from signals that this process handles."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PLAIN = (None, signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


def undisturbed(work: Callable[P, R]) -> Callable[P, R]:
    """Wrap `work` so that processes it starts do not get the signals that this process handles itself.

    Ctrl-C goes to a whole group of processes: a run that ends after its step would lose its compiler. This process
    still handles the signals, in other threads.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        handled = {number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) not in PLAIN}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # child processes inherit the mask
        try:
            return work(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return run
