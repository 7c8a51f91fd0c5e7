"""Where what is made of text is kept: `<data.cache>/<key>/`, whose key depends on all that decides what it holds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.kept import FILE, Kept, found, made

NAME = re.compile(r"[0-9a-f]{20}(\.part)?")  # of what is kept: a cache may hold what others put there
MOST_BYTES, UNUSED_S = 256 * 2**30, 30 * 86_400  # a cache that holds more loses what was unused for so long


def named(key: list[Any]) -> str:
    """The name of what a key stands for."""
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()


def in_cache(cache: Path, key: list[Any], make: Callable[[Path], Any]) -> Kept:
    """What a key stands for, made where the cache has none; raises UserError."""
    folder = cache / named(key)
    with writable("data.cache", folder):
        if (there := found(folder)) is not None:
            return there
        there = made(folder, make)
        with suppress(OSError):  # where another process deletes them too
            bound(cache)
        return there


@contextmanager
def writable(option: str, folder: Path) -> Iterator[None]:
    """Raise a UserError where a folder that an option names cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(option, f"{folder}: {error.strerror or error}; name a folder to write to") from error


def cache_of(given: str | None) -> Path:
    """The folder that `data.cache` names."""
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "compiler-trainer", "tokens")


def bound(cache: Path) -> None:
    """Delete what is kept, the longest unused first, from a cache that holds too much; what was used of late stays."""
    entries = [(*used_and_size(each), each) for each in cache.iterdir() if NAME.fullmatch(each.name)]
    excess, gone = sum(size for _, size, _ in entries) - MOST_BYTES, 0
    for used, size, folder in sorted(entries):
        if gone >= excess or used > time.time() - UNUSED_S:
            break
        shutil.rmtree(folder, ignore_errors=True)
        gone += size
    if gone:
        said = f"{cache} had more than {decimal(MOST_BYTES)}: the longest unused {decimal(gone)} were deleted"
        print(said, flush=True)


def used_and_size(folder: Path) -> tuple[float, int]:
    """When a folder was last used, and its bytes."""
    states = {path.name: path.stat() for path in folder.iterdir()}
    times = [at.st_atime if name == FILE else at.st_mtime for name, at in states.items()]
    return max(times, default=folder.stat().st_mtime), sum(at.st_size for at in states.values())
