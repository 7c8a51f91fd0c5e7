"""Save checkpoints asynchronously: a step waits for a copy in host memory, which a thread writes to disk.

The thread of each rank writes its own file, and once all have done so, rank 0's gives the checkpoint its name. The
threads communicate through their own process group, so steps and saves do not wait for each other. Files and folders
are flushed to disk before the name appears. A failed save leaves earlier checkpoints as they are.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor

from compiler_trainer.checkpoint.index import (
    DTYPE_BY_NAME,
    FILE,
    Damaged,
    File,
    Index,
    TrainState,
    encode,
    read_index,
    sha256,
)
from compiler_trainer.checkpoint.listing import clear, complete, discard, number_of, path_of, remove, steps_to_keep
from compiler_trainer.checkpoint.load import kinds
from compiler_trainer.checkpoint.opened import as_bytes, read_header
from compiler_trainer.checkpoint.pieces import Stateful, state_of
from compiler_trainer.checkpoint.sender import Sender
from compiler_trainer.checkpoint.spread import copy_to_next
from compiler_trainer.checkpoint.staging import Staging
from compiler_trainer.config.errors import RunError, one_line
from compiler_trainer.config.schema import CheckpointConfig
from compiler_trainer.places.store import TRAFFIC
from compiler_trainer.step.ranks import gather, host_group, is_first_of_machine, rank

T = TypeVar("T")
PROGRESS_S = 1.0  # between two looks at the bytes written


class SaveError(RunError):
    """A checkpoint could not be written; the message says which one and why, for each rank."""


class Saver:
    """A context manager that writes checkpoints of `step` into `folder`; its end waits for the last one.

    Every rank creates one and saves at the same steps. If a save fails, rank 0's thread passes the reason to `tell`.
    SaveError is raised at the end if the last save failed. If each machine has a `folder` of its own, `machines` are
    those of all ranks, and each machine's files are copied to the next one.
    """

    def __init__(
        self,
        step: Stateful,
        folder: Path,
        cfg: CheckpointConfig,
        excluded: Set[str] = frozenset(),
        tell: Callable[[str], None] = lambda text: None,
        machines: Sequence[int] = (),
    ):
        self.step, self.folder, self.cfg, self.tell = step, folder, cfg, tell
        state = {name: placed for name, placed in state_of(step).items() if name not in excluded}
        tensors_by_rank = gather({name: (full, min(state[name][1])) for name, full in kinds(state).items()})
        self.tensors = {name: full for part in tensors_by_rank for name, (full, _) in part.items()}
        first = {name: rank for part in reversed(tensors_by_rank) for name, (_, rank) in part.items()}
        self.staging = Staging({name: state[name] for name in self.tensors if name in state}, step.mesh, first)
        self.bytes = sum(math.prod(full.shape) * DTYPE_BY_NAME[full.dtype].itemsize for full in self.tensors.values())
        self.group = host_group()
        self.machines = machines
        self.leads = is_first_of_machine() if machines else 0 in step.ranks  # of the ranks that see the folder
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[str] | None = None
        self.deletable = DeletableCheckpoints(folder, cfg.resume)
        if self.leads:
            clear(folder)
        self.sender = Sender(cfg.store, folder, cfg, tell) if cfg.store and self.leads else None

    def save(self, state: TrainState) -> None:
        """Copy the current state and return; `wait` gives the result of writing the copy."""
        self.wait()
        self.staging.copy(self.step.tensors())
        self.pending = self.thread.submit(self.attempt, state)

    def wait(self) -> str:
        """Wait for the last save; return the reason if it failed, or an empty string.

        Bytes that reach the disk meanwhile count as progress of this rank (`run.timeout_s`).
        """
        last_size = -1
        while self.pending and not wait([self.pending], timeout=PROGRESS_S).done:
            if (size := written_bytes(self.folder)) != last_size:
                TRAFFIC.relative_update(1)
                last_size = size
        return self.pending.result() if self.pending else ""

    def attempt(self, state: TrainState) -> str:
        """Write a checkpoint; return the reason if it failed, or an empty string."""
        path = path_of(self.folder, state.step)
        try:
            self.write(path, state)
            return ""
        except Exception as error:
            failure = f"cannot save {path}: {one_line(error)}"
            if self.leads:
                shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)  # it may be what fills the disk
                self.tell(failure)
            return failure

    def write(self, path: Path, state: TrainState) -> None:
        """Write a checkpoint, on all ranks together."""
        partial_path = path.with_suffix(".tmp")
        self.run_on_all_ranks(lambda: make_empty(partial_path, self.bytes) if self.leads else None)
        written = self.run_on_all_ranks(lambda: write_files(partial_path, self.staging))
        files = {name: file for part in written for name, file in part.items()}
        index = Index(**vars(state), tensors=self.tensors, files=files)
        if self.machines:
            self.run_on_all_ranks(lambda: copy_to_next(partial_path, files, self.machines, self.group))
        self.run_on_all_ranks(lambda: publish(partial_path, path, index, self.deletable) if self.leads else None)
        self.run_on_all_ranks(lambda: self.clean_up(index.step) if self.leads else None)  # once all machines have it

    def clean_up(self, step: int) -> None:
        """Queue a checkpoint for the store if there is one, and delete those that are not kept."""
        delete_others(self.folder, self.cfg, self.deletable, self.sender.spared() if self.sender else frozenset())
        if self.sender:
            self.sender.offer(step)

    def run_on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Return the result of `action` on each rank; raise SaveError on all of them if it fails on one."""
        result: Any = None
        reason = ""
        try:
            result = action()
        except Exception as error:
            reason = f"rank {rank()}: {type(error).__name__}: {error}"
        results = gather((result, reason), self.group)
        if reasons := [reason for _, reason in results if reason]:
            raise SaveError("; ".join(reasons))
        return [result for result, _ in results]

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        failure = self.wait()
        self.thread.shutdown()
        failure = "; ".join(filter(None, (failure, self.sender.end() if self.sender else "")))
        if failure and kind is None:
            raise SaveError(failure)


def written_bytes(folder: Path) -> int:
    """Return the bytes of the checkpoints that are being written in a folder.

    Files are renamed and deleted meanwhile by the thread that writes them; these count as none.
    """
    total = 0
    for partial_path in folder.glob("*.tmp"):
        with suppress(FileNotFoundError):
            for file in partial_path.iterdir():
                total += file.stat().st_size
    return total


def make_empty(partial_path: Path, size: int) -> None:
    """Create an empty folder and its parents, and flush the new ones to disk.

    Raises OSError if the disk has no room for `size` bytes, because filling it would stop other writers.
    """
    remove(partial_path)
    new_folders = [folder for folder in (partial_path, *partial_path.parents) if not folder.exists()]
    partial_path.mkdir(parents=True)
    for folder in new_folders:
        flush(folder.parent)
    free = shutil.disk_usage(partial_path).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size:,} bytes are needed, {free:,} free")


def write_files(partial_path: Path, staging: Staging) -> dict[str, File]:
    """Write a file for each rank of this process that has something to write; return their index entries."""
    files = {}
    for number, pieces in staging.pieces.items():
        path = partial_path / f"rank_{number:05}.safetensors"
        save_file(pieces, path, metadata={key: digest_of(piece) for key, piece in pieces.items()})
        flush(path)
        size = path.stat().st_size
        files[path.name] = File(size, sha256(read_header(path, size)))
    flush(partial_path)
    return files


def digest_of(piece: Tensor) -> str:
    """Return the digest of a piece; computing it is progress."""
    TRAFFIC.relative_update(piece.nbytes)
    return sha256(as_bytes(piece))


class DeletableCheckpoints:
    """The checkpoints in a folder that a run may delete: those that it resumed from and its own, never another run's.

    If the run resumed from a checkpoint elsewhere, those in the folder are another run's. The folder may be replaced by
    a link while the run writes to it.
    """

    def __init__(self, folder: Path, resume: str | None = None):
        self.folder, self.place = folder, place_of(folder)
        is_elsewhere = resume not in (None, "latest", "auto") and Path(str(resume)).resolve().parent != folder.resolve()
        self.steps = set[int]() if is_elsewhere else {number_of(path) for path in complete(folder)}

    def current_steps(self) -> set[int]:
        """Return the steps of these checkpoints; an empty set if the folder was replaced by another one."""
        previous, self.place = self.place, place_of(self.folder)
        if previous not in (None, self.place):
            self.steps = set()
        return self.steps


def place_of(folder: Path) -> tuple[int, int] | None:
    """Return the identity of a folder in its file system, independent of its name."""
    return (status.st_dev, status.st_ino) if folder.is_dir() and (status := folder.stat()) else None


def publish(partial: Path, path: Path, index: Index, deletable: DeletableCheckpoints) -> None:
    """Write the index, and give a complete checkpoint its name."""
    steps = deletable.current_steps()
    (partial / FILE).write_bytes(encode(index))
    flush(partial / FILE)
    flush(partial)
    if os.path.lexists(path):
        if index.step not in steps:
            problem = "another run's checkpoint of that step is there; choose another checkpoint.dir"
            raise FileExistsError(errno.EEXIST, problem)
        discard(path)
    os.rename(partial, path)
    flush(path.parent)
    steps.add(index.step)


def delete_others(folder: Path, cfg: CheckpointConfig, deletable: DeletableCheckpoints, spared: Set[int]) -> None:
    """Delete the checkpoints of a folder that are not kept."""
    steps = deletable.current_steps()
    checkpoints = {n: (p, loss_of(p)) for p in complete(folder) if (n := number_of(p)) in steps}
    to_keep = steps_to_keep([(number, loss) for number, (_, loss) in checkpoints.items()], cfg)
    for number, (old, _) in checkpoints.items():
        if number not in to_keep | spared:
            discard(old)


def loss_of(path: Path) -> float | None:
    """Return the validation loss of a checkpoint; None if it was not evaluated or its index is damaged."""
    try:
        return read_index(path).eval_loss
    except Damaged:
        return None


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
