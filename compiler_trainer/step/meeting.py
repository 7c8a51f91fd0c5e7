"""Where the ranks of one attempt of a job find each other, apart from those of attempts before.

torchrun starts ranks again after one has failed, and its store still holds the addresses of those that are gone
(https://github.com/pytorch/pytorch/issues/135712). Its count of restarts is each node's own. So rank 0 draws a name
for the attempt, and what ranks write and read lies under it. To tell a name from that of an earlier attempt, each rank
draws a number, and takes a name only together with its own number.
"""

from __future__ import annotations

import functools
import secrets
import time
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

POLL_S = 0.02
PATIENCE = timedelta(minutes=10)


class NoMeeting(TimeoutError):
    """Ranks that did not come."""


class Meeting(NamedTuple):
    """The store of this attempt, the name under which its keys lie, this rank, and the number of ranks."""

    store: dist.Store
    name: str
    rank: int
    size: int


@functools.cache
def meeting() -> Meeting:
    """Where this attempt meets; every rank must call it. Raises NoMeeting."""
    store, rank, size = next(dist.rendezvous("env://"))
    mine = secrets.token_hex(8)
    name = give(store, mine, size) if rank == 0 else take(store, mine, rank)
    return Meeting(dist.PrefixStore(name, store), name, rank, size)


def connection() -> dist.Store:
    """A further connection to the store of this attempt: a wait in one holds up who else uses it."""
    return dist.PrefixStore(meeting().name, next(dist.rendezvous("env://"))[0])


def give(store: dist.Store, name: str, size: int) -> str:
    """On rank 0: tell each other rank the name with the number that it drew, until all have it."""
    others, end = range(1, size), time.monotonic() + PATIENCE.total_seconds()
    said: dict[int, bytes] = {}
    while missing := [r for r in others if read(store, f"has{r}") != name.encode()]:
        for r in missing:
            number = read(store, f"number{r}")
            if number and said.get(r) != number:
                store.set(f"name{r}", number.decode() + name)
                said[r] = number
        if time.monotonic() > end:
            raise NoMeeting(f"ranks {missing[:8]} of {size} did not come within {PATIENCE}")
        time.sleep(POLL_S)
    return name


def take(store: dist.Store, number: str, rank: int) -> str:
    """On another rank: the name that comes with its number."""
    store.set(f"number{rank}", number)
    end = time.monotonic() + PATIENCE.total_seconds()
    while not (found := read(store, f"name{rank}").decode()).startswith(number):
        if time.monotonic() > end:
            raise NoMeeting(f"rank 0 did not come within {PATIENCE}")
        time.sleep(POLL_S)
    name = found.removeprefix(number)
    store.set(f"has{rank}", name)
    return name


def read(store: dist.Store, key: str) -> bytes:
    """What is under a key, empty if nothing is."""
    return store.get(key) if store.check([key]) else b""
