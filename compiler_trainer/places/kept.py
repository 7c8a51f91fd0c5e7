"""Folders of files, mostly arrays, that one process makes and many processes map.

    <folder>/  NAME.bin ...  kept.json

A folder exists only when it is complete. Until then `<folder>.part` has the files so far, and a later start continues
with them. Each start compares the files with their recorded digests: small files in full, large ones in blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from compiler_trainer.config.errors import UserError

FILE = "kept.json"
BLOCKS, BLOCK_BYTES = 64, 2**16  # of a larger array, this many blocks are compared, spread over it


class Kept(NamedTuple):
    """A complete folder of files, and the summary recorded when it was made."""

    folder: Path
    holds: Any

    def array(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        """Return one of the arrays, mapped for random access."""
        path = self.folder / f"{name}.bin"
        if not path.stat().st_size:
            return np.empty(0, dtype)
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A sequence has documents from anywhere: read-ahead would read hundreds of times the requested bytes.
        content.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(content, dtype)

    @property
    def size_bytes(self) -> int:
        """The bytes of the folder on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def found(folder: Path, moved: bool = False) -> Kept | None:
    """Return the folder's contents; None if it does not exist, or a file has changed.

    In a folder that may have `moved`, times of change are ignored.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["digest"] != digest_of(kept["holds"], kept["files"]):
            return None
        for name, recorded in kept["files"].items():
            if stamps(folder / name)[moved:] != recorded[moved:]:
                return None
        with suppress(OSError):  # read-only folders of others
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return Kept(folder, kept["holds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, truncated or altered
        return None


def stamps(path: Path) -> list[Any]:
    """Return time of change, size and digest of an array; raise OSError if it is no file."""
    if not path.is_file():  # opening a pipe would block
        raise FileNotFoundError(path)
    state = path.stat()
    return [state.st_mtime_ns, state.st_size, sampled(path)]


def sampled(path: Path) -> str:
    """Return the digest of a file; for a large one that of blocks spread over it, both ends included."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    step = max(BLOCK_BYTES, (size - BLOCK_BYTES) / (BLOCKS - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(min(BLOCKS, -(-size // BLOCK_BYTES))):
            file.seek(round(number * step))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def digest_of(holds: Any, files: dict[str, list[Any]]) -> str:
    """Return the digest of a folder's summary."""
    return hashlib.blake2b(json.dumps([holds, files]).encode(), digest_size=16).hexdigest()


def made(folder: Path, make: Callable[[Path], Any]) -> Kept:
    """Return a folder whose arrays `make` writes, unless another process has made it; `make` returns the summary."""
    partial = part_of(folder)
    with alone(partial / "lock"):
        existing = found(folder)
        if existing is not None:
            shutil.rmtree(partial)
            return existing
        try:
            holds = make(partial)
        except UserError:  # no later start could continue with this
            shutil.rmtree(partial)
            raise
        if folder.exists():
            print(f"{folder} was truncated or altered; making it again", flush=True)
            shutil.rmtree(folder)
        close(partial, holds)
        os.rename(partial, folder)
        return Kept(folder, json.loads((folder / FILE).read_text())["holds"])


def part_of(folder: Path) -> Path:
    """Return the folder for the unfinished files of a folder."""
    return folder.with_name(f"{folder.name}.part")


def close(partial: Path, holds: Any) -> None:
    """Write the summary of a folder, with the state of its files."""
    files = {str(path.relative_to(partial)): stamps(path) for path in files_in(partial)}
    summary = {"digest": digest_of(holds, files), "holds": holds, "files": files}
    (partial / FILE).write_text(json.dumps(summary))


def files_in(folder: Path) -> list[Path]:
    """Return the files below a folder, except locks and the summary."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lock"))
    return sorted(path for path in paths if path.name != FILE)


@contextmanager
def alone(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock at a path; other processes wait, or only those that do not share it."""
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that makes {path.parent}", flush=True)
                fcntl.flock(lock, operation)
            if is_at(lock, path):  # otherwise another process has finished or abandoned the folder and moved it away
                yield
                return


def is_at(file: IO[str], path: Path) -> bool:
    """Return True if an open file is the one at a path."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
