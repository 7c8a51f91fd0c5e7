"""The processes of one machine: start those that the job's first machine orders, and report those that end."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from compiler_trainer.elastic.member import FOLDER, MACHINE, MEMBER, MEMBERS, OUT, POLL_S, ROUND, SLOT

CAME, ENDED = "came", "ended"  # queues of the store: machines, and processes that are over
ORDERS, BEAT, GONE = "orders{}", "beat{}", "gone{}"  # keys of the store, of a machine
SAVING_S = 600  # for ranks to save after a signal to stop, or after another one failed
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent dies


class Came(NamedTuple):
    """A machine that has come: the engine's number for it, its name, and the processes that it starts.

    `gpus` is its number of GPUs, 0 where computations run on the host; `machines` the number of machines that it was
    told of.
    """

    machine: int
    node: int
    name: str
    processes: int
    gpus: int
    machines: int


class Ended(NamedTuple):
    """A process that has ended, with its exit code, or minus the number of the signal that killed it.

    `is_out` is True if the others had left it out, `is_stopping` if its machine had asked it to end.
    """

    machine: int
    member: int
    code: int
    is_out: bool
    is_stopping: bool


class Orders(NamedTuple):
    """The orders to a machine: to start the processes `members`, some of which it has started, and to pass on `signal`.

    `size` is the number of ranks that the job starts with, `code` the exit code of a job that is over.
    """

    members: tuple[int, ...] = ()
    size: int = 0
    signal: int = 0
    code: int | None = None


class Process(NamedTuple):
    """A process of this machine: its number in the job, and its place on the machine, which is that of its GPU."""

    member: int
    slot: int


class Machine:
    """The processes of this machine, which takes the next free number of the job's machines.

    It starts `processes` at first. `node` is the engine's number for it, of `of` machines; `folder` is for snapshots.
    """

    def __init__(self, store: dist.TCPStore, command: Sequence[str], folder: str, processes: int, node: int, of: int):
        self.store, self.command, self.folder = store, list(command), folder
        self.count, self.node, self.of = processes, node, of
        self.number = store.add("machines", 1) - 1
        self.processes: dict[int, Process] = {}  # by process id
        self.started: set[int] = set()
        self.closed_slots: set[int] = set()  # of processes that were left out
        self.signalled, self.deadline = 0, math.inf  # time at which processes that do not end by themselves are killed
        self.code = 0  # of the first process that failed
        gpus = torch.cuda.device_count()
        push(store, CAME, Came(self.number, node, socket.gethostname(), processes, gpus, of))

    def poll(self) -> int | None:
        """Take note of processes that ended, and do what the orders say; return the exit code of a job that is over."""
        self.report()
        self.store.add(BEAT.format(self.number), 1)
        orders = self.orders()
        if self.deadline == math.inf:
            for member in orders.members:
                if member not in self.started:
                    self.start(member, orders.size)
        if orders.signal and not self.signalled:
            self.signalled = orders.signal
            self.forward(orders.signal)
        return None if self.processes else orders.code

    def orders(self) -> Orders:
        """Return the newest orders."""
        key = ORDERS.format(self.number)
        if not self.store.check([key]):
            return Orders()
        members, *others = json.loads(self.store.get(key))
        return Orders(tuple(members), *others)

    def report(self) -> None:
        """Report the processes that have ended to the first machine."""
        for process, code in self.reaped():
            is_out = self.store.check([OUT.format(process.member)])
            if is_out:
                self.closed_slots.add(process.slot)
            push(self.store, ENDED, Ended(self.number, process.member, code, is_out, self.deadline < math.inf))

    def reaped(self) -> Iterator[tuple[Process, int]]:
        """Yield the processes that have ended, with exit codes; kill those that were to end by now."""
        if time.monotonic() > self.deadline:
            self.send(signal.SIGKILL)
        while self.processes and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            self.code = self.code or exit_code(code)
            yield self.processes.pop(ended[0]), code

    def end_alone(self) -> int:
        """Let all processes end without the first machine, after they have saved if they can; return the exit code."""
        self.forward(signal.SIGTERM)
        while self.processes:
            [*self.reaped()]
            time.sleep(POLL_S)
        return self.code or 1

    def leave(self) -> None:
        """Let the first machine know that this one has read the exit code."""
        self.store.set(GONE.format(self.number), "")

    def start(self, member: int, size: int) -> None:
        """Start a process. If this one dies, the first machine's get SIGTERM, to save; those of others are killed."""
        libc, slot = ctypes.CDLL(None, use_errno=True), self.free_slot()
        number = signal.SIGKILL if self.node else signal.SIGTERM
        env = os.environ | {
            "MASTER_ADDR": self.store.host,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "RANK": str(member),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(self.count),
            "GROUP_WORLD_SIZE": str(self.of),
            MACHINE: str(self.number),
            MEMBER: str(member),
            SLOT: str(slot),
            MEMBERS: str(size),
            ROUND: "0",
            FOLDER: self.folder,
        }
        process = subprocess.Popen(self.command, env=env, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, number))
        self.processes[process.pid] = Process(member, slot)
        self.started.add(member)

    def free_slot(self) -> int:
        """Return the first place on this machine that no process has."""
        taken = {*(process.slot for process in self.processes.values()), *self.closed_slots}
        return next(slot for slot in itertools.count() if slot not in taken)

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Pass a signal on to all processes, which save and end."""
        self.deadline = time.monotonic() + SAVING_S
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to all processes."""
        for pid in [*self.processes]:
            os.kill(pid, number)


def push(store: dist.Store, queue: str, message: Came | Ended) -> None:
    """Add a message to a queue of the store."""
    store.queue_push(queue, json.dumps(message))


def exit_code(code: int) -> int:
    """Return the exit code of a process as a shell does: 128 and the number of the signal that killed it."""
    return code if code >= 0 else 128 - code
