"""Compilers that a signal for this process does not end."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PLAIN = (None, signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


def undisturbed(work: Callable[P, R]) -> Callable[P, R]:
    """`work`, in which processes that it starts do not get the signals that this process handles itself.

    Ctrl-C goes to a whole group of processes: a run that ends after its step would lose it with the compiler. This
    process goes on handling them, in other threads.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        handled = {each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) not in PLAIN}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # which a child inherits
        try:
            return work(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return run
