"""Files on disk, most of them arrays, that one process makes and all that read them map.

    <folder>/  NAME.bin ...  kept.json

A folder is there only once it is whole: until then `<folder>.part` holds what there is, and a later start goes on with
it. Each start compares the files with what was written: all of a small one, blocks of a large one.
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
BLOCKS, BLOCK_BYTES = 64, 2**16  # of an array that is larger, so many are compared, spread over it


class Kept(NamedTuple):
    """A whole folder of files, and what was said of them when they were made."""

    folder: Path
    holds: Any

    def array(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        """One of the arrays, mapped to be read here and there."""
        path = self.folder / f"{name}.bin"
        if not path.stat().st_size:
            return np.empty(0, dtype)
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A row is of documents that lie anywhere: to read on behind each would read hundreds of times what is asked.
        content.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(content, dtype)

    @property
    def size_bytes(self) -> int:
        """What it takes on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def found(folder: Path, moved: bool = False) -> Kept | None:
    """What is in a folder; None where there is none, or where a file is not as it was left.

    In a folder that may have `moved`, files may have another time of change.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["digest"] != digest_of(kept["holds"], kept["files"]):
            return None
        for name, was in kept["files"].items():
            if stamps(folder / name)[moved:] != was[moved:]:
                return None
        with suppress(OSError):  # of others, that may only be read
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return Kept(folder, kept["holds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing there, cut or altered
        return None


def stamps(path: Path) -> list[Any]:
    """Time of change, size and digest of an array; raises OSError where it is no file."""
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(path)
    state = path.stat()
    return [state.st_mtime_ns, state.st_size, sampled(path)]


def sampled(path: Path) -> str:
    """The digest of a file, of a large one that of blocks spread over it, its ends among them."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    step = max(BLOCK_BYTES, (size - BLOCK_BYTES) / (BLOCKS - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(min(BLOCKS, -(-size // BLOCK_BYTES))):
            file.seek(round(number * step))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def digest_of(holds: Any, files: dict[str, list[Any]]) -> str:
    """What a folder says of itself."""
    return hashlib.blake2b(json.dumps([holds, files]).encode(), digest_size=16).hexdigest()


def made(folder: Path, make: Callable[[Path], Any]) -> Kept:
    """Let `make` write arrays into the folder that it is given and say what they hold, unless another process has."""
    partial = part_of(folder)
    with alone(partial / "lock"):
        there = found(folder)
        if there is not None:
            shutil.rmtree(partial)
            return there
        try:
            holds = make(partial)
        except UserError:  # no later start would go on with this
            shutil.rmtree(partial)
            raise
        if folder.exists():
            print(f"{folder} was cut or altered, and is made anew", flush=True)
            shutil.rmtree(folder)
        close(partial, holds)
        os.rename(partial, folder)
        return Kept(folder, json.loads((folder / FILE).read_text())["holds"])


def part_of(folder: Path) -> Path:
    """Where a folder is made."""
    return folder.with_name(f"{folder.name}.part")


def close(partial: Path, holds: Any) -> None:
    """Write down what a folder holds, and how its files are left."""
    files = {str(path.relative_to(partial)): stamps(path) for path in files_in(partial)}
    summary = {"digest": digest_of(holds, files), "holds": holds, "files": files}
    (partial / FILE).write_text(json.dumps(summary))


def files_in(folder: Path) -> list[Path]:
    """The files below a folder, but for locks and what is written down of them."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lock"))
    return sorted(path for path in found if path.name != FILE)


@contextmanager
def alone(path: Path, shared: bool = False) -> Iterator[None]:
    """Keep other processes, or only those that do not share, from the lock at a path: they wait."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that makes {path.parent}", flush=True)
                fcntl.flock(lock, how)
            if is_at(lock, path):  # else the other has made the folder, or has given up, and moved it away
                yield
                return


def is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one at a path."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
