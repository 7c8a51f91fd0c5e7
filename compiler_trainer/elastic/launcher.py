"""Start the ranks of this machine, hold their store, and begin a round for those that are left when one is killed."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from compiler_trainer.elastic.member import (
    COMING,
    ELASTIC,
    FOLDER,
    LEFT,
    LISTED,
    MEMBER,
    MEMBERS,
    MESH,
    NEWEST,
    OUT,
    POLL_S,
    READY,
    ROUND,
    SLOT,
    WAITING,
    WANTED,
)

HOST = "127.0.0.1"
MEMORY, PREFIX = Path("/dev/shm"), "compiler-trainer-"
SAVING_S = 600  # for ranks to save after a signal to stop, or after another one failed
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent dies
SHAKEN_S = 60  # after a loss: other processes that crash in this time do so because of it
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Launcher:
    """The processes of a job on this machine; `run` returns when all have ended.

    They end together, with the exit code of the first that fails. In a job of `run.elastic=true` a process that a
    signal kills is only left out: the others are told that a round begins, with the list of those that are left. Up to
    `spares` new processes replace lost ones, and join when they are ready. So do up to `count` others replace processes
    that crash soon after another one was lost, as NCCL's do. If the command line does not tell that a job is `elastic`,
    the first rank that has read its options does.
    """

    def __init__(self, count: int, command: Sequence[str], spares: int = 0, elastic: bool = False):
        self.command, self.count, self.spares, self.code = list(command), count, spares, 0
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.folder = folder_of_snapshots()
        self.numbers, self.rounds = itertools.count(), itertools.count()
        self.members: dict[int, int] = {}  # number of a process, by its process id
        self.slots: dict[int, int] = {}  # by process id
        self.closed_slots: set[int] = set()  # of processes that were left out
        self.listed: list[int] = []  # the processes of this round
        self.lock, self.is_over = threading.RLock(), threading.Event()
        self.wanted = ""  # the newest mesh that was asked for
        if elastic:
            self.store.set(ELASTIC, "")
        self.end = math.inf  # time at which processes that do not end by themselves are killed
        self.crashes_left, self.last_loss = count, -math.inf

    def run(self) -> int:
        """Start the processes and wait for them; return the exit code."""
        old_handlers = {number: signal.signal(number, self.forward) for number in SIGNALS}
        thread = threading.Thread(target=self.watch, daemon=True)
        try:
            self.begin_round(range(self.count))
            for _ in range(self.count):
                self.start()
            thread.start()
            while self.members:
                pid, status = os.waitpid(-1, 0)
                with self.lock:
                    self.ended(pid, os.waitstatus_to_exitcode(status))
            return self.code
        finally:
            self.is_over.set()
            thread.join()
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start a process, which gets SIGTERM if this one dies."""
        libc, member, slot = ctypes.CDLL(None, use_errno=True), next(self.numbers), self.free_slot()
        env = os.environ | {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "RANK": str(member),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            MEMBER: str(member),
            SLOT: str(slot),
            MEMBERS: str(self.count),
            ROUND: "0",
            FOLDER: str(self.folder),
        }
        process = subprocess.Popen(
            self.command, env=env, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        )
        self.members[process.pid], self.slots[process.pid] = member, slot

    def free_slot(self) -> int:
        """Return the first place on this machine that no process has."""
        return next(slot for slot in itertools.count() if slot not in {*self.slots.values(), *self.closed_slots})

    def begin_round(self, members: Sequence[int]) -> None:
        """Begin a round of the given processes."""
        self.listed, self.round = list(members), next(self.rounds)
        if set(self.members.values()) - set(members):
            self.store.set(COMING.format(self.round), "")
        if self.wanted:
            self.store.set(MESH.format(self.round), self.wanted)
        self.store.set(LISTED.format(self.round), ",".join(map(str, members)))
        self.store.set(NEWEST, str(self.round))

    def ready(self) -> list[int]:
        """Return the processes that are there and can take part in a round."""
        return sorted(n for n in self.members.values() if n in self.listed or self.store.check([READY.format(n)]))

    def watch(self) -> None:
        """Begin a round when the ranks left the last one for it, or none of them is there any more."""
        while not self.is_over.wait(POLL_S):
            with self.lock:
                if time.monotonic() > self.end:
                    self.send(signal.SIGKILL)
                if self.store.check([WANTED]) and (wanted := self.store.get(WANTED).decode()) != self.wanted:
                    self.resize(wanted)
                is_empty = not set(self.listed) & set(self.members.values())
                if (is_empty or self.store.check([LEFT.format(self.round)])) and (members := self.ready()):
                    self.begin_round(members)

    def resize(self, wanted: str) -> None:
        """Start the processes that a wanted mesh lacks, for which ranks leave the round, or let them leave it now."""
        self.wanted, missing = wanted, json.loads(wanted)["ranks"] - len(self.members)
        for _ in range(missing):
            self.start()
        if missing <= 0:
            self.store.set(WAITING.format(self.round), "")

    def ended(self, pid: int, code: int) -> None:
        """Take note of a process that ended: leave it out and start another one, or end the others if it failed."""
        member, slot = self.members.pop(pid), self.slots.pop(pid)
        is_out = self.store.check([OUT.format(member)])
        if (code < 0 or is_out) and self.end == math.inf and self.store.check([ELASTIC]):
            if is_out:
                self.closed_slots.add(slot)
            elif self.is_replaced(-code):
                self.start()
            members = self.ready()
            self.tell(member, code, len(members))
            if members:
                self.begin_round(members)
            if self.members:
                return
        if code and not self.code:
            self.code = exit_code(code)
            self.forward(signal.SIGTERM)

    def is_replaced(self, number: int) -> bool:
        """Return True if another process replaces one that a signal ended."""
        last, self.last_loss = self.last_loss, time.monotonic()
        if number in CRASHES and self.last_loss - last < SHAKEN_S and self.crashes_left:
            self.crashes_left -= 1
            return True
        self.spares -= 1
        return self.spares >= 0

    def tell(self, member: int, code: int, left: int) -> None:
        """Print that a process is gone, and how many are left."""
        name = f"rank {self.listed.index(member)}" if member in self.listed else "a process that was starting"
        if not code:
            reason = self.store.get(OUT.format(member)).decode()
            print(f"{name} is left out ({reason}): {left} are left", file=sys.stderr, flush=True)
            return
        further = ", and another one starts" if len(self.members) > left else ""
        print(f"{name} is gone ({signal.Signals(-code).name}): {left} are left{further}", file=sys.stderr, flush=True)

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Pass a signal on to all processes, which save and end."""
        self.end = time.monotonic() + SAVING_S
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to all processes."""
        for pid in self.members:
            os.kill(pid, number)


def folder_of_snapshots() -> Path:
    """Create a folder in the memory of this machine; delete those of launchers that were killed."""
    parent = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    for old in parent.glob(f"{PREFIX}*-*"):
        pid = old.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)  # of another user: it stays
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def exit_code(code: int) -> int:
    """Return the exit code of a process as a shell does: 128 and the number of the signal that killed it."""
    return code if code >= 0 else 128 - code
