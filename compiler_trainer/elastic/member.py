"""One process of a job that `launch` started: the rank that it has in each round, and a watch over rounds that begin.

A rank that waits for a killed one fails as soon as a connection to it closes. It then leaves its process groups, which
closes its own connections, so that the ranks that wait for it fail, too. A rank that does not fail is interrupted
(`interrupt.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.elastic.interrupt import interrupt
from compiler_trainer.step.meeting import ROUND
from compiler_trainer.step.ranks import gpu_of_process

MEMBER, MEMBERS, FOLDER = "COMPILER_TRAINER_MEMBER", "COMPILER_TRAINER_MEMBERS", "COMPILER_TRAINER_SNAPSHOTS"
MACHINE = "COMPILER_TRAINER_MACHINE"  # the number of a process's machine
SLOT = "COMPILER_TRAINER_SLOT"  # the place on the machine, and number of the GPU, that a process keeps in all rounds
ELASTIC, FINISHED, NEWEST, WANTED, RUN = "elastic", "finished", "round", "wanted", "run.dir"  # keys of the store
CAPACITY = "capacity"  # the number of GPUs that the job can use, if it uses any
READY = "ready{}"  # of a process that can take part in a round
OUT = "out{}"  # of a process that the others leave out: the reason
LISTED, COMING, WAITING, LEFT, MESH = "members{}", "coming{}", "waiting{}", "left{}", "mesh{}"  # of a round
TROUBLE = "trouble{}"  # of a round in which a rank has failed, maybe because another one is lost
POLL_S, PATIENCE_S = 0.05, 10.0  # longer than a machine may be silent
POLLS_PER_S = 10_000  # for all ranks together, because one process answers them
NCCL = {  # settings of PyTorch, whose watchdog would end every process that has lost a peer
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # a quarter of what it sleeps after an error; groups wait for it
}


class Regroup(Exception):
    """The end of a round that all ranks leave after the same step, because another process waits to join."""


class LeftOut(RunError):
    """The end of a round after which `ranks` take no part any more, for a reason that all ranks have found."""

    def __init__(self, ranks: Collection[int], reason: str):
        super().__init__(reason)
        self.ranks = ranks


def is_member() -> bool:
    """Return True if `launch` started this process."""
    return MEMBER in os.environ


def is_awaited() -> bool:
    """Return True if a process waits to join this round's."""
    return connection().check([WAITING.format(os.environ[ROUND])])


def address() -> str:
    """Return the address of the launcher's store."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def connect() -> dist.Store:
    """Return a connection to the launcher's store; a wait blocks all threads that share one."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def ask_for(address: str, mesh: MeshConfig, ranks: int) -> None:
    """Ask a launcher for another mesh; raise UserError if it does not answer, or has not enough GPUs."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE_S).close()  # the store prints its own failure at length
    except OSError as error:
        raise UserError("RUN", f"has no launcher at {address}: the job has ended, or is on another machine") from error
    store = dist.TCPStore(host, int(port), is_master=False)
    if store.check([CAPACITY]) and ranks > (most := int(store.get(CAPACITY))):
        raise UserError("mesh", f"needs {ranks} ranks, and the job has {most} GPUs; choose smaller sizes")
    store.set(WANTED, json.dumps({"mesh": dataclasses.asdict(mesh), "ranks": ranks}))


@functools.cache
def connection() -> dist.Store:
    """Return the main thread's connection."""
    return connect()


class Member:
    """A process and its place in the current round."""

    def __init__(self) -> None:
        self.number, self.count = int(os.environ[MEMBER]), int(os.environ[MEMBERS])
        self.round, self.store = 0, connection()
        self.machines: list[int] = []  # of the processes of this round
        os.environ |= NCCL
        gpu_of_process()
        self.store.set(ELASTIC, "")
        self.store.set(READY.format(self.number), "")

    def agree(self, key: str, value: str) -> str:
        """Return the value that the first process gave for a key."""
        return self.store.compare_set(key, "", value).decode()

    def join(self) -> tuple[int, int]:
        """Join the newest round; return (its place among the processes that take part, their number).

        A process that came later waits for a round that lists it, and lets the ranks know that it waits.
        """
        self.round = self.newest_round()
        while self.number not in (members := self.members()):
            self.store.set(WAITING.format(self.round), "")
            self.next_round()
            self.round = self.newest_round()
        return members.index(self.number), len(members)

    def take(self, place: int, size: int) -> tuple[int, int]:
        """Take the rank `place` of `size`; return the rank on this machine, and how many of them it has."""
        here = [other for other in range(size) if self.machines[other] == self.machines[place]]
        os.environ |= {ROUND: str(self.round), "RANK": str(place), "LOCAL_RANK": str(here.index(place))}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(len(here))}
        return here.index(place), len(here)

    def newest_round(self) -> int:
        """Return the number of the newest round."""
        return int(self.store.get(NEWEST))

    def members(self) -> list[int]:
        """Return the processes of this round, and note their machines."""
        listed = json.loads(self.store.get(LISTED.format(self.round)))
        self.machines = [machine for _, machine in listed]
        return [number for number, _ in listed]

    def mesh(self, first: MeshConfig) -> MeshConfig:
        """Return the mesh that is wanted in this round: the `first` one, unless another was asked for."""
        key = MESH.format(self.round)
        return MeshConfig(**json.loads(self.store.get(key))["mesh"]) if self.store.check([key]) else first

    def is_joined_soon(self) -> bool:
        """Return True if a process that replaces a lost one was starting when this round began."""
        return self.store.check([COMING.format(self.round)])

    def leave(self) -> None:
        """Let the launcher begin a round, with the processes that wait to join."""
        self.store.set(LEFT.format(self.round), "")

    def tell_trouble(self) -> None:
        """Let the launcher know that this rank has failed, so that it looks for machines that are silent."""
        self.store.set(TROUBLE.format(self.round), "")

    def quit(self, reason: str) -> NoReturn:
        """End this process, so that the others go on without it."""
        self.store.set(OUT.format(self.number), reason)
        sys.exit(0)

    def next_round(self, patience_s: float = math.inf) -> bool:
        """Wait for the next round; return False if none begins in time, so that no rank was lost.

        Ends the process if the job ends meanwhile.
        """
        end = time.monotonic() + patience_s
        while self.newest_round() == self.round:
            if self.store.check([FINISHED]):
                sys.exit(0)
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupt this thread if it is still in the block when another round has begun."""
        over, current = threading.Event(), self.round

        def watch() -> None:
            store = connect()
            with suppress(dist.DistError, RuntimeError):  # the launcher is gone; SIGTERM ends this process
                while not over.wait(max(POLL_S, self.count / POLLS_PER_S)):
                    if int(store.get(NEWEST)) != current:
                        interrupt(over, start_again)
                        return

        thread = threading.Thread(target=watch, daemon=True, name="rounds")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def start_again() -> NoReturn:
    """Replace this process by a new one of the same number, which joins the newest round."""
    os.environ |= {"RANK": os.environ[MEMBER], "WORLD_SIZE": os.environ[MEMBERS], "LOCAL_RANK": os.environ[SLOT]}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
