"""The ranks of a job: join and leave the process group of torchrun's environment, or use the caller's."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.step.connections import close_connections, noting_connections
from compiler_trainer.step.meeting import meeting, meeting_in
from passes.lower.cudagraphs import release
from passes.torch_private import abort_groups, gloo_of_one_thread, see_one_gpu

T = TypeVar("T")
POLL_S = 0.1
POLLS_PER_S = 10_000  # for all ranks together, because one process answers them
RECORDED = "2000"  # collectives that NCCL's flight recorder keeps
QUEUES = "32"  # device queues; with fewer than streams (CUDA's default is 8), kernels wait for other streams' transfers
PATIENCE = timedelta(hours=1)  # for ranks that compile; `run.timeout_s` reports a rank that hangs in a step earlier
HOST = "gloo_in_order"  # the backend of groups over host memory
groups, turns = itertools.count(), itertools.count()
joined: list[Any] = []  # the default group, if `start_ranks` made it
leaving, is_waiting, is_cut_off = threading.Lock(), threading.Event(), threading.Event()


def host_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a backend over host memory whose connections `close_connections` knows."""
    with noting_connections():
        return gloo_of_one_thread(store, rank, size, timeout)


dist.Backend.register_backend(HOST, host_backend, devices=["cpu"])


def start_ranks() -> int:
    """Join the job that torchrun started (gloo on CPU, nccl on CUDA); return the number of ranks, 1 without torchrun.

    A process that has left may join again, as a sweep does for each point; a rank that has joined stays. If there is
    a default group, as in a worker of Ray, it is used.
    """
    if "RANK" not in os.environ and not dist.is_initialized():
        return 1
    if not dist.is_initialized():
        gpu = gpu_of_process()
        if torch.cuda.is_available():
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)
            torch.cuda.set_device(gpu)
        store, _, rank, size = meeting()
        # The store still holds the addresses of earlier groups, so each group has its own prefix.
        group_store = dist.PrefixStore(f"job{next(groups)}", store)
        backend = "nccl" if torch.cuda.is_available() else HOST
        dist.init_process_group(backend, timeout=PATIENCE, store=group_store, rank=rank, world_size=size)
        joined[:] = [dist.group.WORLD]
    return dist.get_world_size()


@functools.cache
def gpu_of_process() -> int:
    """Return the number of this process's GPU, which it keeps: 0 if CUDA starts here, since it then sees no other."""
    local_rank = int(os.environ["LOCAL_RANK"])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)  # read when CUDA starts
    count = 0 if torch.version.cuda is None else torch.cuda.device_count()
    if 1 < count <= local_rank:
        fix = f"start {count} ranks on it (torchrun --nproc-per-node)"
        raise UserError("LOCAL_RANK", f"is {local_rank}, but this machine has {count} GPUs; {fix}")
    return see_one_gpu(local_rank)


def another_store(name: str) -> dist.Store | None:
    """Return a thread's own connection to the store, because a wait blocks all users of a connection."""
    if not dist.is_initialized():
        return None
    return dist.PrefixStore(f"{name}{next(groups)}", store_of_job().clone())  # type: ignore[attr-defined]


def store_of_job() -> dist.Store:
    """Return the store of all ranks; in a job, every rank must call this."""
    return (meeting() if dist.group.WORLD in joined else meeting_in(dist.group.WORLD)).store


def stop_ranks() -> None:
    """Leave the process group, without waiting for ranks that failed; a caller's group stays."""
    release()
    if dist.is_initialized() and dist.group.WORLD in joined:
        joined.clear()  # a group that is referenced keeps its connections open
        dist.destroy_process_group()


@contextmanager
def waiting_for_device() -> Iterator[None]:
    """Allow another thread to abort collectives, because this one waits for the device and launches none.

    Raises RunError if it did, because values that the device computed may then be unfinished.
    """
    is_waiting.set()
    try:
        yield
    finally:
        is_waiting.clear()  # before `is_cut_off` is read: `abort_wait` sets that before it reads `is_waiting`
    if is_cut_off.is_set():
        raise RunError("a rank is gone, and the collectives with it were aborted")


def abort_wait(has_left: threading.Event) -> None:
    """Abort the collectives for which the main thread waits; called by another thread.

    Those of gloo fail because their connections close. An abort of NCCL's frees what the launch of a collective uses,
    so it happens only in `waiting_for_device`. It ends when the main thread has left its groups.
    """
    while True:
        with leaving:
            if has_left.is_set() or not dist.is_initialized():
                return
            close_connections()
            if dist.get_backend() != "nccl":
                return
            is_cut_off.set()
            if is_waiting.is_set():
                abort_groups()
        time.sleep(POLL_S / 10)


def rejoin() -> None:
    """Leave a job of which ranks are gone, as if this process had not been in it."""
    global groups, turns
    release()  # before the lock: NCCL aborts a communicator only when no recorded CUDA graph uses it
    with leaving:
        close_connections()
        if dist.is_initialized():
            joined.clear()
            abort_groups()
        is_cut_off.clear()
    meeting.cache_clear()
    groups, turns = itertools.count(), itertools.count()


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def place_in_job() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; 0 and 1 without a process group."""
    return rank(), dist.get_world_size() if dist.is_initialized() else 1


def local_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def place_on_node() -> tuple[int, int]:
    """Return (local rank, ranks on this machine); without torchrun, all ranks are on this machine."""
    return int(os.environ.get("LOCAL_RANK", rank())), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def is_first_of_machine() -> bool:
    """Return True if this process acts for all ranks of its machine."""
    return not dist.is_initialized() or place_on_node()[0] == 0


def from_rank_0(value: Callable[[], T]) -> T:
    """Call `value` on rank 0 only, and return its result on all ranks."""
    if not dist.is_initialized():
        return value()
    parcel: list[Any] = [value() if rank() == 0 else None]
    dist.broadcast_object_list(parcel, src=0)
    return parcel[0]


def try_on_rank_0(action: Callable[[], T]) -> T:
    """Call `action` on rank 0 only, and return its result, or raise its UserError, on all ranks."""

    def attempt() -> tuple[T | None, tuple[str, str] | None]:
        try:
            return action(), None
        except UserError as error:
            return None, (error.place, error.message)

    result, problem = from_rank_0(attempt)
    if problem is not None:
        raise UserError(*problem)
    return cast(T, result)


def first_of_each_machine_first(make: Callable[[], T]) -> T:
    """Call `make` on one rank of each machine, then on the other ranks, without a time limit."""
    if not dist.is_initialized():
        return make()
    local, on_machine = place_on_node()
    store, done_key = dist.PrefixStore(f"turn{next(turns)}", store_of_job()), "done"
    if local == 0:
        try:
            result = make()
        finally:
            store.add(done_key, on_machine)  # machines may have different numbers of ranks
    while store.add(done_key, 0) < dist.get_world_size():  # a wait in the store would time out
        time.sleep(max(POLL_S, dist.get_world_size() / POLLS_PER_S))
    return result if local == 0 else make()


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of a group, or of all ranks, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def new_group(members: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new group of some ranks, or of all; only its members call this, at the same time.

    Its name contains the number of groups that a member has and has not destroyed, so all ranks must make the same
    number of groups, and none may be destroyed before the default group: the next one would have its name.
    """
    return dist.new_group(members, PATIENCE, backend, use_local_synchronization=True)  # type: ignore[return-value]


def host_group() -> dist.ProcessGroup | None:
    """Return a new group of all ranks over host memory, or None without torchrun; all ranks must call it."""
    return new_group(backend=HOST) if dist.is_initialized() else None
