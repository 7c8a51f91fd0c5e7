"""Compiled results in a folder: one file per entry, written atomically, and checked when it is read.

For files elsewhere, such as libraries that a compiler builds, an entry holds the digest. A changed file is built again,
because loading it may end the process without a message, or compute something else.
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

from passes.torch_private import compiler_folder

DIGEST_BYTES = 32
DAY_S = 86_400


@dataclass(frozen=True)
class Store:
    """A folder of entries by key; processes may read and write it at the same time."""

    folder: Path

    def get(self, key: str) -> bytes | None:
        """Return the entry, None if there is none, or if it is damaged or cannot be read; that is a warning."""
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
        """Store an entry, replacing an earlier one; if the disk does not take it, that is a warning."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / key, hashlib.sha256(content).digest() + content)
        except OSError as error:
            message = f"{self.folder} cannot be written ({error.strerror}); later starts compile from scratch"
            warnings.warn(message, stacklevel=2)

    def note(self, path: Path) -> None:
        """Store the digest of a file that was just built, and flush the file to the disk."""
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            self.put(digest_key(path), hashlib.file_digest(file, "sha256").digest())

    def is_as_noted(self, path: Path) -> bool:
        """Return True if a file exists and has the digest that was noted; if it is damaged, warn and delete the note.

        Otherwise, if a rebuild of it is killed, a partial file would have a note, and seem damaged.
        """
        digest = self.get(digest_key(path))
        if digest is None:
            return False
        if path.is_file():
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").digest() == digest:
                    mark_used(path)
                    return True
            warnings.warn(f"{path} is damaged; it is built again", stacklevel=2)
        with suppress(OSError):  # the folder may be read-only
            (self.folder / digest_key(path)).unlink()
        return False


def body_store() -> Store:
    """Return the store of compiled bodies, in Inductor's cache folder."""
    return Store(compiler_folder() / "bodies")


def digest_key(path: Path) -> str:
    """Return the key of a file's digest."""
    return f"{path.parent.name}.{path.name}.sha256"


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically: it gets its name once it is complete and on the disk."""
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
    """Mark a file as used now; a read-only folder stays as it is."""
    with suppress(OSError):
        os.utime(path)


def bound(folder: Path, most_bytes: int) -> str:
    """Delete the least recently used files under a folder until it has at most `most_bytes`.

    Files used within a day stay. Return a message, empty if nothing was deleted.
    """
    files = sorted(files_in(folder))
    excess, deleted = sum(size for _, size, _ in files) - most_bytes, 0
    for used, size, path in files:
        if deleted >= excess or used > time.time() - DAY_S:
            break
        Path(path).unlink(missing_ok=True)
        deleted += size
    message = f"{folder} had more than {most_bytes / 2**30:g} GiB: the oldest {deleted / 2**20:,.0f} MiB were deleted"
    return message if deleted else ""


def files_in(folder: Path) -> Iterable[tuple[float, int, str]]:
    """Yield (last use, size, path) of every file in a folder and below it."""
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            yield max(status.st_mtime, status.st_atime), status.st_size, path
