"""What was compiled before, in a folder: one file an entry, written whole or not at all, checked when it is read."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

DIGEST_BYTES = 32


@dataclass(frozen=True)
class Store:
    """A folder of entries by key; processes may read and write it at the same time."""

    folder: Path

    def get(self, key: str) -> bytes | None:
        """The entry, None if there is none; one that was damaged is said, and is none."""
        path = self.folder / key
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return content
        warnings.warn(f"{path} is damaged; it is compiled again", stacklevel=2)
        return None

    def put(self, key: str, content: bytes) -> None:
        """Store an entry, in the place of one that there may be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=".")
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(name, self.folder / key)
