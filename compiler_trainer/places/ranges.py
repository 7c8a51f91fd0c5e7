"""Files in a store that are read where they are, in ranges of bytes. Reads that fail are tried again."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

from compiler_trainer.config.errors import UserError
from compiler_trainer.places.store import Place, Unreachable, store_errors

T = TypeVar("T")
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before each further attempt
FIND_BYTES = 2**16  # read at a time to find a separator


def with_retries(url: str, action: Callable[[], T]) -> T:
    """Return the result of an action on a store, repeated while the store does not answer; raise UserError."""
    for wait in WAITS_S:
        try:
            return action()
        except Unreachable:
            time.sleep(wait)
    try:
        return action()
    except Unreachable as error:
        raise UserError(url, f"{error.message} (tried {len(WAITS_S) + 1} times)") from error


@functools.lru_cache(2)
def opened(url: str) -> RemoteFile:
    """Return the file at a url, which stays open for the next of its parts."""
    return RemoteFile(url)


class RemoteFile(io.RawIOBase):
    """A file at a url, as a file to read and as bytes to slice and search; raises UserError."""

    def __init__(self, url: str):
        self.url, self.at, self.opened = url, 0, None
        self.size_bytes = with_retries(url, Place(url).entry).size_bytes

    def range(self, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` on, or fewer at the end of the file."""
        size = max(0, min(size, self.size_bytes - start))
        return with_retries(self.url, lambda: self._range(start, size)) if size else b""

    def _range(self, start: int, size: int) -> bytes:
        file: Any = self.opened or Place(self.url).open()
        self.opened = None  # after an error, the file is opened again
        with store_errors(self.url):
            try:
                file.seek(start)
                content = file.read(size)
            except ValueError as error:
                raise UserError(self.url, f"its server does not send parts of files ({error}); download it") from error
            if len(content) != size:
                raise OSError(f"{len(content):,} of {size:,} bytes came")
        self.opened = file
        return content

    # ---- as bytes ----

    def __len__(self) -> int:
        return self.size_bytes

    def __getitem__(self, part: slice) -> bytes:
        start, end, _ = part.indices(self.size_bytes)
        return self.range(start, end - start)

    def find(self, separator: bytes, start: int) -> int:
        """Return the position of the first separator from byte `start` on, or -1."""
        content = b""
        while start + len(content) < self.size_bytes:
            searched = max(0, len(content) - len(separator) + 1)
            content += self.range(start + len(content), max(FIND_BYTES, len(content)))
            if (at := content.find(separator, searched)) >= 0:
                return start + at
        return -1

    # ---- as a file ----

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, and return its number."""
        self.at = offset + (0, self.at, self.size_bytes)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and return the number of bytes."""
        content = self.range(self.at, len(buffer))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)
