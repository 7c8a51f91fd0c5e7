"""The cache of processed text and of copies from stores: `<data.cache>/<key>/`, keyed by everything it depends on."""

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
from compiler_trainer.places.folders import FILE, StoredFolder, load_folder, make_folder

NAME = re.compile(r"[0-9a-f]{20}(\.part)?")  # of entries; other programs may store files in the same folder
COPIES = "copies"  # its folder for copies of remote files
GIB = 2**30
UNUSED_S, UNREAD_S = 30 * 86_400, 600  # unused time after which processed text, and copies, may be deleted


class Cache(NamedTuple):
    """A folder, and the size in bytes above which long-unused entries are deleted."""

    folder: Path
    most_bytes: float = 256 * GIB


def folder_name(key: list[Any]) -> str:
    """Return the folder name of a key."""
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()


def get_or_make(cache: Cache, key: list[Any], make: Callable[[Path], Any]) -> StoredFolder:
    """Return the entry of a key, which is made if the cache lacks it; raise UserError."""
    folder = cache.folder / folder_name(key)
    with writable("data.cache", folder):
        if (entry := load_folder(folder)) is not None:
            return entry
        entry = make_folder(folder, make)
        shrink(cache)
        return entry


@contextmanager
def writable(option: str, folder: Path) -> Iterator[None]:
    """Raise UserError in place of an OSError while writing a folder that an option names."""
    try:
        yield
    except OSError as error:
        raise UserError(option, f"{folder}: {error.strerror or error}; choose a writable folder") from error


def cache_of(cfg: DataConfig) -> Cache:
    """Return the cache of `data.cache` and `data.cache_gib`."""
    return Cache(Path(cfg.cache).expanduser() if cfg.cache else default_folder(), cfg.cache_gib * GIB)


def default_folder() -> Path:
    """Return the cache of this user; raise UserError if the user has no home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "compiler-trainer", "tokens")
    except RuntimeError as error:
        raise UserError("data.cache", "is not set, and this user has no home directory; give a folder") from error


def shrink(cache: Cache, coming: int = 0) -> int:
    """Delete long-unused entries if the cache is too large; return the bytes that are still in excess.

    Copies are deleted first, and the least recently used ones before others. The size includes `coming` bytes that are
    about to be added.
    """
    copies, texts = list_entries(cache.folder / COPIES), list_entries(cache.folder)
    excess, deleted = sum(size for _, size, _ in (*copies, *texts)) + coming - cache.most_bytes, 0
    for unused_s, entries in ((UNREAD_S, copies), (UNUSED_S, texts)):
        for last_used, size, folder in sorted(entries):
            if deleted >= excess or last_used > time.time() - unused_s:
                break
            shutil.rmtree(folder, ignore_errors=True)
            deleted += size
    if deleted:
        limit = decimal(int(cache.most_bytes))
        print(f"{cache.folder} had more than {limit}: the longest unused {decimal(deleted)} were deleted", flush=True)
    return max(0, int(excess - deleted))


def list_entries(folder: Path) -> list[tuple[float, int, Path]]:
    """Return (time of last use, size in bytes, path) of each entry of a folder."""
    entries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process may delete entries too
            if NAME.fullmatch(path.name):
                entries.append((*used_and_size(path), path))
    return entries


def used_and_size(folder: Path) -> tuple[float, int]:
    """Return the time of a folder's last use, and its size in bytes."""
    states = [(path.name, path.stat()) for path in folder.rglob("*") if path.is_file()]
    times = [state.st_atime if name == FILE else state.st_mtime for name, state in states]
    return max(times, default=folder.stat().st_mtime), sum(state.st_size for _, state in states)
