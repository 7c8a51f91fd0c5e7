"""Name the rank that died when a connection to it closes.

Ranks that wait for a killed rank fail in whatever collective they are in, and the error does not name the rank. So a
thread of each rank answers a call. The first rank that fails calls; ranks that do not answer are gone.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

from compiler_trainer.step.ranks import another_store, rank

POLL_S, PATIENCE_S = 0.5, 5.0
SHOWN = 8
CLOSED = re.compile(  # messages of gloo, NCCL and the store
    r"Connection (closed|reset) by peer( \[[^\]]*\](:\d+)?)?|Broken pipe|ncclRemoteError|remote process exited"
    r"|Socket closed|failed to recv, got 0 bytes|Connection refused"
)


class Peers:
    """A context manager that answers calls for this rank, and ends the process with one line if a rank is gone."""

    def __init__(self) -> None:
        self.store = another_store("peers")
        self.stop_event = threading.Event()
        self.thread = threading.Thread(target=self.answer, daemon=True, name="peers")

    def answer(self) -> None:
        """Answer when a rank calls."""
        while self.store is not None and not self.stop_event.wait(POLL_S):
            try:
                if self.store.check(["call"]):
                    self.store.set(key(rank()), "")
                    return
            except RuntimeError:  # the store is gone; the main thread reports it
                return

    def name_missing(self, problem: str) -> str:
        """Return a message naming the ranks that do not answer, or an empty string if another rank reports them."""
        assert self.store is not None
        try:
            missing = self.call(dist.get_world_size())
            if self.store.add("told", 1) > 1:
                return ""
        except RuntimeError:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return f"rank 0 or its node is gone: the store at {address} does not answer ({problem})"
        if not missing:
            return f"a connection between ranks failed, although all ranks answer: {problem}"
        ranks = ", ".join(str(number) for number in missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        single = f"rank {ranks} is gone: it does not answer"
        return f"{single if len(missing) == 1 else f'ranks {ranks} are gone: they do not answer'} any more ({problem})"

    def call(self, size: int) -> list[int]:
        """Call all ranks, and return those that do not answer within `PATIENCE_S`."""
        assert self.store is not None
        self.store.set("call", "")
        self.store.set(key(rank()), "")
        end = time.monotonic() + PATIENCE_S
        while not self.store.check([key(number) for number in range(size)]):
            if time.monotonic() > end:
                return [number for number in range(size) if not self.store.check([key(number)])]
            time.sleep(POLL_S / 5)
        return []

    def leave(self) -> None:
        """Let the other ranks end before rank 0, whose process holds the store; it waits at most `PATIENCE_S`."""
        assert self.store is not None
        with suppress(RuntimeError):
            self.store.set(f"left{rank()}", "")
            remaining = [n for n in range(1, dist.get_world_size()) if self.store.check([key(n)])]
            end = time.monotonic() + PATIENCE_S
            while rank() == 0 and time.monotonic() < end and not self.store.check([f"left{n}" for n in remaining]):
                time.sleep(POLL_S / 5)

    def __enter__(self) -> Peers:
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        problem = closed_connection(error)
        if problem and self.store is not None:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the remaining ranks
            if message := self.name_missing(problem):
                print(f"error: {message}", file=sys.stderr, flush=True)
            self.leave()
            os._exit(1)  # destroying groups with a dead rank may hang
        self.stop_event.set()


def key(number: int) -> str:
    """Return the store's key under which a rank answers."""
    return f"here{number}"


def closed_connection(error: BaseException | None) -> str:
    """Return the text about a closed connection in an error or its causes, or an empty string."""
    while error is not None:
        if isinstance(error, (RuntimeError, OSError)) and (match := CLOSED.search(str(error))):
            return match[0]
        error = error.__cause__
    return ""
