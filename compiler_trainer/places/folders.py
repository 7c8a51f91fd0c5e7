"""Folders of files, mostly arrays, that one process makes and all readers map.

    <folder>/  NAME.bin ...  kept.json

A folder appears only once it is complete: until then the files are in `<folder>.part`, and a later start continues from
them. Each start compares the files with the digests: small files completely, large ones in sampled blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
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
LOCK = re.compile(r"lock-\d+-of-\d+")
BLOCKS, BLOCK_BYTES = 64, 2**16  # number and size of the blocks that are compared, spread over a larger file


class StoredFolder(NamedTuple):
    """A complete folder of files, and the facts that were recorded when they were made."""

    folder: Path
    holds: Any

    def array(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        """Return one of the arrays, mapped for random access."""
        path = self.folder / f"{name}.bin"
        if not path.stat().st_size:
            return np.empty(0, dtype)
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # A row has documents from anywhere in the file, so readahead would read hundreds of times the needed bytes.
        content.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(content, dtype)

    @property
    def size_bytes(self) -> int:
        """The size on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def load_folder(folder: Path, is_moved: bool = False) -> StoredFolder | None:
    """Return the content of a folder; None if there is none, or if a file was changed.

    In a folder that may have been moved (`is_moved`), files may have another modification time.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        if record["digest"] != digest_of(record["holds"], record["files"]):
            return None
        for name, state in record["files"].items():
            if stamps(folder / name)[is_moved:] != state[is_moved:]:
                return None
        with suppress(OSError):  # fails for read-only folders of other users
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return StoredFolder(folder, record["holds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, truncated or changed
        return None


def stamps(path: Path) -> list[Any]:
    """Return modification time, size and digest of a file; raise OSError if it is not a file."""
    if not path.is_file():  # reading a pipe would block
        raise FileNotFoundError(path)
    state = path.stat()
    return [state.st_mtime_ns, state.st_size, sample_digest(path)]


def sample_digest(path: Path) -> str:
    """Return the digest of a file; for a large one, of blocks spread over it, including both ends."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    step = max(BLOCK_BYTES, (size - BLOCK_BYTES) / (BLOCKS - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(min(BLOCKS, -(-size // BLOCK_BYTES))):
            file.seek(round(number * step))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def digest_of(holds: Any, files: dict[str, list[Any]]) -> str:
    """Return the digest of a folder's record."""
    return hashlib.blake2b(json.dumps([holds, files]).encode(), digest_size=16).hexdigest()


def make_folder(folder: Path, make: Callable[[Path], Any]) -> StoredFolder:
    """Call `make` to write files into a folder and return their facts, unless another process has made it.

    Returns the complete folder.
    """
    partial_path = partial_path_of(folder)
    with hold_lock(lock_of(folder)):
        existing = load_folder(folder)
        if existing is not None:
            shutil.rmtree(partial_path, ignore_errors=True)
            return existing
        partial_path.mkdir(parents=True, exist_ok=True)
        try:
            holds = make(partial_path)
        except UserError:  # a later start could not continue from this
            shutil.rmtree(partial_path)
            raise
        if folder.exists():
            print(f"{folder} was truncated or changed, and is made again", flush=True)
            shutil.rmtree(folder)
        close(partial_path, holds)
        os.rename(partial_path, folder)
        return StoredFolder(folder, json.loads((folder / FILE).read_text())["holds"])


def lock_of(folder: Path) -> Path:
    """Return the path of the lock of those that make a folder: next to it, where nobody moves or deletes it."""
    return folder.with_name(f"{folder.name}.lock")


def partial_path_of(folder: Path) -> Path:
    """Return the path under which a folder is made."""
    return folder.with_name(f"{folder.name}.part")


def close(partial_path: Path, holds: Any) -> None:
    """Record the facts of a folder, and the state of its files."""
    files = {str(path.relative_to(partial_path)): stamps(path) for path in files_in(partial_path)}
    summary = {"digest": digest_of(holds, files), "holds": holds, "files": files}
    (partial_path / FILE).write_text(json.dumps(summary))


def files_in(folder: Path) -> list[Path]:
    """Return the files below a folder, except locks of shares (`lock-0-of-2`) and the record."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path.name != FILE and not LOCK.fullmatch(path.name))


@contextmanager
def hold_lock(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock at a path, waiting for its other holders; with `shared`, only for exclusive ones."""
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that holds {path}", flush=True)
                fcntl.flock(lock, mode)
            if not is_at(lock, path):
                continue  # its holder has deleted the file
            try:
                yield
            finally:
                if not shared:  # nobody else holds it; those that wait open a new file
                    path.unlink(missing_ok=True)
            return


def is_at(file: IO[str], path: Path) -> bool:
    """Return True if an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:  # its holder has removed it
        return False
