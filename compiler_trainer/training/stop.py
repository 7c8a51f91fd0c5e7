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

from compiler_trainer.config.errors import Stopped
from compiler_trainer.config.options import seconds
from compiler_trainer.config.schema import Config, RunConfig
from compiler_trainer.elastic.member import MEMBERS, is_member
from compiler_trainer.step.ranks import host_group, rank, stop_ranks
from compiler_trainer.training.loggers import announce

REPEATED_S = 5.0  # schedulers signal all processes of a job, and torchrun forwards its signal to the ranks
TIME, WISH = 1, 100  # the highest number of any rank is the reason; a signal's is its own added to TIME


class Stop:
    """A context manager that handles `run.stop_signals`; the second time, a signal ends the process at once.

    Within `REPEATED_S` of the first time, it does not count as the second. `run.time_limit` counts from `began` (in
    `time.monotonic` seconds).
    """

    def __init__(self, cfg: RunConfig, began: float):
        self.signals = signals_of(cfg)
        self.end = float("inf") if cfg.time_limit is None else began + seconds(cfg.time_limit)
        self.signal_reason = self.reason = 0
        self.callback_reason = ""  # a callback's reason
        self.group = host_group()
        self.old_handlers: dict[signal.Signals, Any] = {}
        self.watcher: threading.Thread | None = None

    def is_last_step(self) -> bool:
        """Return True if this step is the last one, the same on all ranks; all ranks must call this after each step."""
        self.reason = self.maximum(
            max(self.signal_reason, WISH * bool(self.callback_reason), TIME * (time.monotonic() >= self.end))
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
        return "run.time_limit" if self.reason == TIME else signal.Signals(self.reason - TIME).name

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal; this is the signal handler."""
        self.signal_reason = TIME + number

    def watch(self, arrivals: int) -> None:
        """End the process at its second signal; the numbers of signals arrive in the pipe `arrivals`.

        The pipe delivers them immediately, but Python calls a handler only after the running kernel returns.
        """
        first_at = dict[int, float]()
        with open(arrivals, "rb", buffering=0) as pipe:
            numbers = (byte[0] for byte in iter(lambda: pipe.read(1), b""))
            for number in (n for n in numbers if n in self.signals):
                if not first_at:
                    name = signal.Signals(number).name
                    announce(f"{name}: the run ends after the current step; a second signal ends it at once")
                if time.monotonic() - first_at.setdefault(number, time.monotonic()) >= REPEATED_S:
                    end_at_once(number)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            arrivals, self.pipe = os.pipe()
            os.set_blocking(self.pipe, False)
            self.woken = signal.set_wakeup_fd(self.pipe)
            self.watcher = threading.Thread(target=self.watch, args=(arrivals,), daemon=True)
            self.watcher.start()
            self.old_handlers = {number: signal.signal(number, self.note) for number in self.signals}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self.old_handlers.items():
            signal.signal(number, ignore_repeats(handler) if TIME + number == self.reason else handler)
        if self.watcher is not None:
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


def signals_of(cfg: RunConfig) -> tuple[signal.Signals, ...]:
    """Return the signals that end a run."""
    return tuple(signal.Signals[f"SIG{name}"] for name in cfg.stop_signals)


@contextmanager
def ending_at_signals(cfg: RunConfig) -> Iterator[None]:
    """End the process at a signal inside the block, with cleanup, so that the files so far are kept.

    SIGINT raises KeyboardInterrupt, as always.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        announce(f"{signal.Signals(number).name} while compiling: no step was taken")
        raise Stopped(cfg.exit_codes.stopped)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    old_handlers = {n: signal.signal(n, end) for n in signals_of(cfg) if n != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def end_at_once(number: int) -> NoReturn:
    """Print that this rank ends without saving, and end the process."""
    problem = f"rank {rank()} ended at once by a second signal, {signal.Signals(number).name}"
    print(f"error: {problem}; nothing was saved after the last checkpoint", file=sys.stderr, flush=True)
    os._exit(128 + number)


def end_early(cfg: Config, stop: Stop, number: int) -> NoReturn:
    """Print why a run ended early and how to resume it; exit with `run.exit_codes.stopped`."""
    advice = f"resume with: {how_to_go_on(cfg.run.dir)}" if cfg.checkpoint.saves else "nothing was saved"
    announce(f"stopped after step {number} of {cfg.train.steps} because of {stop}; {advice}")
    stop_ranks()
    raise Stopped(cfg.run.exit_codes.stopped)


def how_to_go_on(run: str) -> str:
    """Return the command that resumes a run on as many ranks as there are now."""
    nodes, local_size = int(os.environ.get("GROUP_WORLD_SIZE", 1)), os.environ.get("LOCAL_WORLD_SIZE")
    if is_member():
        ranks = os.environ[MEMBERS] if nodes == 1 else f"{local_size} --nnodes {nodes} --node-rank N --master-addr HOST"
        return f"compiler-trainer launch -n {ranks} resume {shlex.quote(run)}"
    options = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    command = (
        f"torchrun{options} --nproc-per-node {local_size} -m compiler_trainer" if local_size else "compiler-trainer"
    )
    return f"{command} resume {shlex.quote(run)}"
