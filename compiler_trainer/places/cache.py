"""The cache of tokenized text and of copies from stores: `<data.cache>/<key>/`, keyed by all inputs."""

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
from typing import Any, NamedTuple

from rich.filesize import decimal

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig
from compiler_trainer.places.kept import FILE, Kept, found, made

NAME = re.compile(r"[0-9a-f]{20}(\.part)?")  # of an entry; the folder may also have files of others
COPIES = "copies"  # the folder of copies of remote files
GIB = 2**30
UNUSED_S, UNREAD_S = 30 * 86_400, 600  # minimum idle time before an entry, and a copy, may be deleted


class Cache(NamedTuple):
    """A folder, and the size in bytes above which its least recently used entries are deleted."""

    folder: Path
    most_bytes: float = 256 * GIB


def named(key: list[Any]) -> str:
    """Return the folder name of a key."""
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()


def in_cache(cache: Cache, key: list[Any], make: Callable[[Path], Any]) -> Kept:
    """Return the entry of a key, made if the cache has none; raise UserError if the folder cannot be written."""
    folder = cache.folder / named(key)
    with writable("data.cache", folder):
        if (entry := found(folder)) is not None:
            return entry
        entry = made(folder, make)
        bound(cache)
        return entry


@contextmanager
def writable(option: str, folder: Path) -> Iterator[None]:
    """Raise a UserError if a folder that an option names cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(option, f"{folder}: {error.strerror or error}; name a folder to write to") from error


def cache_of(cfg: DataConfig) -> Cache:
    """Return the cache of `data.cache` and `data.cache_gib`."""
    default_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "compiler-trainer", "tokens")
    return Cache(Path(cfg.cache).expanduser() if cfg.cache else default_folder, cfg.cache_gib * GIB)


def bound(cache: Cache, coming: int = 0) -> int:
    """Delete least recently used idle entries, copies first, until the cache fits; return the bytes still in excess.

    `coming` bytes are about to be added. Entries used within `UNUSED_S`, and copies within `UNREAD_S`, stay.
    """
    copies, entries_of_cache = listed(cache.folder / COPIES), listed(cache.folder)
    excess, deleted = sum(size for _, size, _ in (*copies, *entries_of_cache)) + coming - cache.most_bytes, 0
    for unused_s, entries in ((UNREAD_S, copies), (UNUSED_S, entries_of_cache)):
        for used, size, folder in sorted(entries):
            if deleted >= excess or used > time.time() - unused_s:
                break
            shutil.rmtree(folder, ignore_errors=True)
            deleted += size
    if deleted:
        limit = decimal(int(cache.most_bytes))
        print(f"{cache.folder} exceeded {limit}: deleted the least recently used {decimal(deleted)}", flush=True)
    return max(0, int(excess - deleted))


def listed(folder: Path) -> list[tuple[float, int, Path]]:
    """Return (time of last use, bytes, path) of each entry of a folder."""
    entries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process may delete it meanwhile
            if NAME.fullmatch(path.name):
                entries.append((*used_and_size(path), path))
    return entries


def used_and_size(folder: Path) -> tuple[float, int]:
    """Return the time of last use of a folder, and its bytes."""
    states = [(path.name, path.stat()) for path in folder.rglob("*") if path.is_file()]
    times = [state.st_atime if name == FILE else state.st_mtime for name, state in states]
    return max(times, default=folder.stat().st_mtime), sum(state.st_size for _, state in states)
