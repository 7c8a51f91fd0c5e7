"""Stop a run before its last step, after the same step on all ranks: on any rank's signal, or at a time limit."""

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
from compiler_trainer.elastic.member import MEMBERS, is_member
from compiler_trainer.step.ranks import host_group, rank, stop_ranks
from compiler_trainer.training.loggers import announce

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED_S = 5.0  # schedulers signal all processes of a job, and torchrun forwards its signal to the ranks
TIME = 1  # below the numbers of SIGNALS; the highest number of any rank is the reason
WISH = 100  # above all signals: a run that a callback ends is complete


class Stop:
    """A context manager that handles signals; a second signal ends the process at once.

    The same signal again within `REPEATED_S` of the first does not count as a second one. The time limit is `limit_s`
    seconds after `began` (in `time.monotonic` seconds); None means no limit.
    """

    def __init__(self, began: float, limit_s: float | None):
        self.end = began + limit_s if limit_s is not None else float("inf")
        self.signal_number = self.reason = 0
        self.callback_reason = ""  # a callback's reason
        self.group = host_group()
        self.old_handlers: dict[signal.Signals, Any] = {}

    def is_last_step(self) -> bool:
        """Return True if this step is the last one, the same on all ranks; all ranks must call this after each step."""
        self.reason = self.maximum(
            max(self.signal_number, WISH * bool(self.callback_reason), TIME * (time.monotonic() >= self.end))
        )
        return self.reason > 0

    def maximum(self, number: int) -> int:
        """Return the maximum of `number` over all ranks; every rank must call this."""
        flag = torch.tensor(number)
        if self.group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, self.group)
        return int(flag)

    def ask(self, why: str) -> None:
        """Make this step the last one, for the reason that a callback gives."""
        self.callback_reason = self.callback_reason or why or "a callback requested it"

    @property
    def is_wish(self) -> bool:
        """True if a callback of any rank ends the run."""
        return self.reason == WISH

    def __str__(self) -> str:
        return "run.time_limit" if self.reason == TIME else signal.Signals(self.reason).name

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; this is the signal handler."""
        self.signal_number = number

    def watch(self, arrivals: int) -> None:
        """End the process at its second signal; the numbers of signals arrive in the pipe `arrivals`.

        The pipe delivers them immediately, but Python calls a handler only after the running kernel returns.
        """
        first, at = 0, 0.0
        with open(arrivals, "rb", buffering=0) as pipe:
            numbers = (byte[0] for byte in iter(lambda: pipe.read(1), b""))
            for number in (n for n in numbers if n in SIGNALS):
                if not first:
                    first, at = number, time.monotonic()
                    name = signal.Signals(number).name
                    announce(f"{name}: the run ends after the current step; a second signal ends it at once")
                elif number != first or time.monotonic() - at >= REPEATED_S:
                    end_at_once(number)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            arrivals, self.pipe = os.pipe()
            os.set_blocking(self.pipe, False)
            self.woken = signal.set_wakeup_fd(self.pipe)
            self.watcher = threading.Thread(target=self.watch, args=(arrivals,), daemon=True)
            self.watcher.start()
            self.old_handlers = {number: signal.signal(number, self.note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, ignore_repeats(handler) if number == self.reason else handler)
        if self.old_handlers:
            signal.set_wakeup_fd(self.woken)
            os.close(self.pipe)
            self.watcher.join()  # prints its line on the first signal before the line on the end


def ignore_repeats(handler: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that ignores repeats of the signal that ended a run, so that they do not change the exit code.

    After `REPEATED_S` it restores the original `handler` and raises the signal again.
    """
    end = time.monotonic() + REPEATED_S

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= end:
            signal.signal(number, handler)
            os.kill(os.getpid(), number)

    return handle


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit inside the block, so that cleanup runs and the files so far are kept."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        announce("SIGTERM while compiling: no step was taken")
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    old_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def end_at_once(number: int) -> NoReturn:
    """Print that this rank ends without saving, and end the process."""
    problem = f"rank {rank()} ended at once by a second signal, {signal.Signals(number).name}"
    print(f"error: {problem}; nothing was saved after the last checkpoint", file=sys.stderr, flush=True)
    os._exit(128 + number)


def end_early(cfg: Config, stop: Stop, number: int) -> NoReturn:
    """Print why a run ended early and how to resume it; exit with code 3, or 0 under torchrun's `--max-restarts`."""
    advice = f"resume with: {how_to_go_on(cfg.run.dir)}" if cfg.checkpoint.saves else "nothing was saved"
    announce(f"stopped after step {number} of {cfg.train.steps} because of {stop}; {advice}")
    stop_ranks()
    restarted = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0  # after an error torchrun would restart
    raise SystemExit(0 if restarted else STOPPED)


def how_to_go_on(run: str) -> str:
    """Return the command that resumes a run on as many ranks as there are now."""
    if is_member():
        return f"compiler-trainer launch -n {os.environ[MEMBERS]} resume {shlex.quote(run)}"
    nodes, local_size = int(os.environ.get("GROUP_WORLD_SIZE", 1)), os.environ.get("LOCAL_WORLD_SIZE")
    options = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    command = (
        f"torchrun{options} --nproc-per-node {local_size} -m compiler_trainer" if local_size else "compiler-trainer"
    )
    return f"{command} resume {shlex.quote(run)}"
