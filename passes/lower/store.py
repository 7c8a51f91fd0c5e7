"""What was compiled before, in a folder: one file an entry, written whole or not at all, checked when it is read.

Of files that lie elsewhere, as libraries that a compiler builds, an entry holds the digest: what is not as it was
built is built anew, for to load it may end the process without a word, or compute something else.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from passes.program.torch_private import compiler_folder

DIGEST_BYTES = 32
DAY_S = 86_400


@dataclass(frozen=True)
class Store:
    """A folder of entries by key; processes may read and write it at the same time."""

    folder: Path

    def get(self, key: str) -> bytes | None:
        """The entry, None if there is none; one that was damaged, or cannot be read, is said, and is none."""
        path = self.folder / key
        try:
            data = path.read_bytes()
            mark_used(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"{path} cannot be read ({error.strerror}); it is compiled again", stacklevel=2)
            return None
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return content
        warnings.warn(f"{path} is damaged; it is compiled again", stacklevel=2)
        return None

    def put(self, key: str, content: bytes) -> None:
        """Store an entry, in the place of one that there may be; a disk that takes none is said."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / key, hashlib.sha256(content).digest() + content)
        except OSError as error:
            said = f"{self.folder} takes nothing more ({error.strerror}); later starts compile anew"
            warnings.warn(said, stacklevel=2)

    def note(self, path: Path) -> None:
        """Keep the digest of a file that was just built, and is flushed to the disk."""
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            self.put(noted(path), hashlib.file_digest(file, "sha256").digest())

    def is_as_noted(self, path: Path) -> bool:
        """Whether a file is there and is as it was when noted; one that is damaged is said, and the note forgotten.

        Else a build of it that is killed would leave a part of a file that has a note, and seem damaged.
        """
        digest = self.get(noted(path))
        if digest is None:
            return False
        if path.is_file():
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").digest() == digest:
                    mark_used(path)
                    return True
            warnings.warn(f"{path} is damaged; it is built again", stacklevel=2)
        with suppress(OSError):  # of a folder that takes no change either
            (self.folder / noted(path)).unlink()
        return False


def stored() -> Store:
    """Return the store of compiled bodies, in Inductor's cache folder."""
    return Store(compiler_folder() / "bodies")


def noted(path: Path) -> str:
    """The key of a file's digest."""
    return f"{path.parent.name}.{path.name}.sha256"


def replace(path: Path, content: bytes) -> None:
    """Write a file under its name once it is whole and on the disk."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def mark_used(path: Path) -> None:
    """Let a file count as used now; a folder that may only be read stays as it is."""
    with suppress(OSError):
        os.utime(path)


def bound(folder: Path, most_bytes: int) -> str:
    """Delete files of a folder and of those in it, the longest unused first, until it has at most so many bytes.

    What was used within a day stays. What to say of it, empty where nothing was deleted.
    """
    found = sorted(files_in(folder))
    excess, gone = sum(size for _, size, _ in found) - most_bytes, 0
    for used, size, path in found:
        if gone >= excess or used > time.time() - DAY_S:
            break
        Path(path).unlink(missing_ok=True)
        gone += size
    said = f"{folder} had more than {most_bytes / 2**30:g} GiB: the oldest {gone / 2**20:,.0f} MiB were deleted"
    return said if gone else ""


def files_in(folder: Path) -> Iterable[tuple[float, int, str]]:
    """(last use, size, path) of every file in a folder and below it."""
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            yield max(status.st_mtime, status.st_atime), status.st_size, path
