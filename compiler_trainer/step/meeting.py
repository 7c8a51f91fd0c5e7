"""The meeting point of the ranks of one attempt of a job, separate from that of earlier attempts.

torchrun restarts ranks after a failure, and its store still holds the addresses of the failed ones
(https://github.com/pytorch/pytorch/issues/135712). Each node has its own count of restarts, so it cannot serve as a
name. Instead, rank 0 draws a name for the attempt, and all keys of the attempt have it as prefix. To tell this name
from that of an earlier attempt, each rank draws a number, and accepts a name only together with this number.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from compiler_trainer.config.errors import RunError
from passes.torch_private import default_store

ROUND = "COMPILER_TRAINER_ROUND"  # the attempt, if the launcher counts attempts itself
POLL_S = 0.02
PATIENCE = timedelta(minutes=10)


class NoMeeting(RunError):
    """A job whose ranks cannot meet; each one says so, because none knows of the others."""

    is_of_all_ranks = False


class Meeting(NamedTuple):
    """The store of this attempt, the prefix of its keys, this rank, and the number of ranks."""

    store: dist.Store
    name: str
    rank: int
    size: int


@functools.cache
def meeting() -> Meeting:
    """Return the meeting point of this attempt; every rank must call this. Raises NoMeeting."""
    try:
        store, rank, size = next(dist.rendezvous("env://"))
    except (dist.DistError, ValueError) as error:
        raise NoMeeting(why_not(error)) from error
    if ROUND in os.environ:
        name = f"round{os.environ[ROUND]}"
        return Meeting(dist.PrefixStore(name, store), name, rank, size)
    mine = secrets.token_hex(8)
    name = give(store, mine, size) if rank == 0 else take(store, mine, rank)
    return Meeting(dist.PrefixStore(name, store), name, rank, size)


@functools.lru_cache(1)
def meeting_in(group: dist.ProcessGroup) -> Meeting:
    """Return the meeting point of the ranks of a default group that the caller made; every rank must call this."""
    name: list[str] = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    return Meeting(dist.PrefixStore(name[0], default_store()), name[0], dist.get_rank(), dist.get_world_size())


def why_not(error: Exception) -> str:
    """Return why the store of this job cannot be opened, and what to do."""
    number, address, port = (os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if "EADDRINUSE" in str(error):
        return f"MASTER_PORT: {port} is in use on the machine of rank {number}; choose another port"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    fix = "rank 0 must be running, and MASTER_ADDR and MASTER_PORT must be its machine and port"
    return f"rank {number} cannot reach the store of the job at {address}:{port} ({reason}); {fix}"


def give(store: dist.Store, name: str, size: int) -> str:
    """On rank 0: give each other rank the name with the number it drew, until all have it; return the name."""
    other_ranks, end = range(1, size), time.monotonic() + PATIENCE.total_seconds()
    names_given: dict[int, bytes] = {}
    while waiting := [r for r in other_ranks if read(store, f"has{r}") != name.encode()]:
        for r in waiting:
            number = read(store, f"number{r}")
            if number and names_given.get(r) != number:
                store.set(f"name{r}", number.decode() + name)
                names_given[r] = number
        if time.monotonic() > end:
            raise NoMeeting(f"ranks {waiting[:8]} of {size} did not come within {PATIENCE}")
        time.sleep(POLL_S)
    return name


def take(store: dist.Store, number: str, rank: int) -> str:
    """On other ranks: return the name that comes with this rank's number."""
    store.set(f"number{rank}", number)
    end = time.monotonic() + PATIENCE.total_seconds()
    while not (value := read(store, f"name{rank}").decode()).startswith(number):
        if time.monotonic() > end:
            raise NoMeeting(f"rank 0 did not come within {PATIENCE}")
        time.sleep(POLL_S)
    name = value.removeprefix(number)
    store.set(f"has{rank}", name)
    return name


def read(store: dist.Store, key: str) -> bytes:
    """Return a key's value, or an empty one."""
    return store.get(key) if store.check([key]) else b""
