"""An end before the last step, at which all ranks stop after the same one: a signal that any rank got, or a time."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from compiler_trainer.config.errors import STOPPED
from compiler_trainer.config.schema import Config
from compiler_trainer.step.ranks import host_group, rank, stop_ranks
from compiler_trainer.training.progress import announce

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED_S = 5.0  # a scheduler signals all processes of a job, and torchrun passes its own signal on to its ranks
TIME = 1  # less than any signal's number among those above; of several reasons the highest number counts
WISH = 100  # more than any: a run that a callback ends is done


class Stop:
    """Watches for signals while it is used as a context manager; a second one ends the process at once.

    The same signal again within `REPEATED_S` of the first is no second one.
    `limit_s` seconds after `began` (of `time.monotonic`) it is time to stop; None: never.
    """

    def __init__(self, began: float, limit_s: float | None):
        self.end = began + limit_s if limit_s is not None else float("inf")
        self.asked = self.reason = 0
        self.why = ""  # a callback asked
        self.group = host_group()
        self.before: dict[signal.Signals, Any] = {}

    def now(self) -> bool:
        """Whether this step is the last: the same on all ranks, each of which asks after each step."""
        self.reason = self.most(max(self.asked, WISH * bool(self.why), TIME * (time.monotonic() >= self.end)))
        return self.reason > 0

    def most(self, number: int) -> int:
        """The highest number of any rank; each gives one."""
        flag = torch.tensor(number)
        if self.group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self.group)
        return int(flag)

    def ask(self, why: str) -> None:
        """Let this step be the last, for what a callback says."""
        self.why = self.why or why or "a callback asked for it"

    @property
    def is_wish(self) -> bool:
        """Whether a callback of any rank ends the run."""
        return self.reason == WISH

    def __str__(self) -> str:
        return "run.time_limit" if self.reason == TIME else signal.Signals(self.reason).name

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: keep it in mind."""
        self.asked = number

    def watch(self, arrivals: int) -> None:
        """End the process at its second signal; numbers of signals arrive in the pipe.

        There they are at once, while Python calls no handler until a kernel is done.
        """
        first, at = 0, 0.0
        with open(arrivals, "rb", buffering=0) as pipe:
            numbers = (byte[0] for byte in iter(lambda: pipe.read(1), b""))
            for number in (n for n in numbers if n in SIGNALS):
                if not first:
                    first, at = number, time.monotonic()
                    name = signal.Signals(number).name
                    announce(f"{name}: the run ends after the step under way; a second one ends it at once")
                elif number != first or time.monotonic() - at >= REPEATED_S:
                    end_at_once(number)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            arrivals, self.pipe = os.pipe()
            os.set_blocking(self.pipe, False)
            self.woken = signal.set_wakeup_fd(self.pipe)
            self.watcher = threading.Thread(target=self.watch, args=(arrivals,), daemon=True)
            self.watcher.start()
            self.before = {each: signal.signal(each, self.note) for each in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for each, before in self.before.items():
            signal.signal(each, passed_over(before) if each == self.reason else before)
        if self.before:
            signal.set_wakeup_fd(self.woken)
            os.close(self.pipe)
            self.watcher.join()  # its line about the first signal precedes the line about the end


def passed_over(before: Any) -> Callable[[int, FrameType | None], None]:
    """A handler of the signal that ended a run: repeated while the process ends, it must not change the exit code."""
    end = time.monotonic() + REPEATED_S

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= end:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    return handle


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """While on, SIGTERM ends this rank as an exception does, so that what is at hand is kept."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        announce("SIGTERM while compiling: no step was taken")
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # no other may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_at_once(number: int) -> NoReturn:
    """Say why a rank ends with nothing saved, and end it."""
    again = f"rank {rank()} ended at once by a second signal, {signal.Signals(number).name}"
    print(f"error: {again}; nothing was saved after the last checkpoint", file=sys.stderr, flush=True)
    os._exit(128 + number)


def end_early(cfg: Config, stop: Stop, number: int) -> NoReturn:
    """Say on rank 0 why a run ended after a step, and how it goes on; exits with 3, or 0 under `--max-restarts`."""
    saved = f"go on with: {how_to_go_on(cfg.run.dir)}" if cfg.checkpoint.saves else "nothing was saved"
    announce(f"stopped after step {number} of {cfg.train.steps}, for {stop}; {saved}")
    stop_ranks()
    restarted = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0  # torchrun would start the ranks again
    raise SystemExit(0 if restarted else STOPPED)


def how_to_go_on(run: str) -> str:
    """The command that resumes a run on the ranks that there are."""
    nodes, of_node = int(os.environ.get("GROUP_WORLD_SIZE", 1)), os.environ.get("LOCAL_WORLD_SIZE")
    across = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    start = f"torchrun{across} --nproc-per-node {of_node} -m compiler_trainer" if of_node else "compiler-trainer"
    return f"{start} resume {shlex.quote(run)}"
