"""Start the ranks of this machine, in a job of one machine or several; the first machine also decides on the rounds."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from compiler_trainer.checkpoint import bring_to_run
from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.elastic.engines import Place
from compiler_trainer.elastic.machine import Machine
from compiler_trainer.elastic.member import ELASTIC
from compiler_trainer.elastic.rounds import COMING_S, Rounds

ALONE = Place("this machine", 0, 1, 0, 1, "127.0.0.1", 0, "1")
MEMORY, PREFIX = Path("/dev/shm"), "compiler-trainer-"
POLL_S, FOLLOWER_POLL_S = 0.05, 0.25
LEAVING_S = 5.0  # for other machines to read the exit code
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Launcher:
    """The processes of a job on this machine; `run` returns when those of all machines have ended.

    The first machine, `place.rank` 0, holds the store; without it the job ends. If the command line does not tell that
    a job is `elastic`, the first rank that has read its options does. Raises UserError if the port is in use or the
    first machine is not there.
    """

    def __init__(
        self, count: int, command: Sequence[str], spares: int = 0, elastic: bool = False, place: Place = ALONE
    ):
        self.place, self.store = place, store_at(place)
        self.folder = folder_of_snapshots()
        self.machine = Machine(self.store, command, str(self.folder), count, place.rank, place.size)
        self.rounds = Rounds(self.store, place.size, spares) if place.rank == 0 else None
        if elastic:
            self.store.set(ELASTIC, "")

    def run(self) -> int:
        """Start the processes and wait for them; return the exit code."""
        old_handlers = {number: signal.signal(number, self.machine.forward) for number in SIGNALS}
        try:
            return self.lead(self.rounds) if self.rounds else self.follow()
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            shutil.rmtree(self.folder, ignore_errors=True)

    def lead(self, rounds: Rounds) -> int:
        """Decide on the rounds until all processes have ended; return the exit code."""
        while True:
            rounds.poll()
            code = self.machine.poll()
            if code is not None:
                break
            time.sleep(POLL_S)
        end = time.monotonic() + LEAVING_S
        while rounds.has_followers() and time.monotonic() < end:
            time.sleep(POLL_S)
        return code

    def follow(self) -> int:
        """Do what the first machine orders until the job is over, or that machine is gone; return the exit code."""
        machine = self.machine
        try:
            while (code := machine.poll()) is None:
                time.sleep(FOLLOWER_POLL_S)
        except dist.DistError:
            print(f"the first machine ({self.place.address}) is gone: the job ends", file=sys.stderr, flush=True)
            code = machine.end_alone()
            bring_to_run(self.folder)
            return code
        machine.leave()
        return code


def store_at(place: Place) -> dist.TCPStore:
    """Return the job's store, which the first machine holds; wait for it elsewhere."""
    try:
        return dist.TCPStore(
            place.address, place.port, None, place.rank == 0, timedelta(seconds=COMING_S), wait_for_workers=False
        )
    except (dist.DistError, ValueError) as error:
        if place.rank == 0:
            raise UserError("--master-port", f"{place.port} is in use on this machine; choose another port") from error
        problem = f"cannot reach the first machine at {place.address}:{place.port} within {COMING_S:.0f} s"
        raise RunError(f"machine {place.rank} {problem}; it must run the same command, with --node-rank=0") from error


def folder_of_snapshots() -> Path:
    """Create a folder in the memory of this machine; delete those of launchers that were killed."""
    parent = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    for old in parent.glob(f"{PREFIX}*-*"):
        pid = old.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)  # of another user: it stays
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
