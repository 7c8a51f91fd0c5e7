"""The local path of a name: a path, a copy from a store, or a snapshot in the hub's cache.

A copy in the cache is complete or absent. Above the cache's limit, copies that were not read recently are deleted; a
copy without room is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.places.cache import COPIES, UNREAD_S, Cache, bound, named, writable
from compiler_trainer.places.kept import files_in, found, made
from compiler_trainer.places.store import Entry, Place, chosen, one_line, parted

LARGE = 2**28  # bytes from which on a copy is announced
HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # organization/name, with an optional revision


def file_here(name: str, cache: Cache, beside: str = "") -> str:
    """Return the local path of a file; for a file in a store that of a copy, with the file `beside` next to it."""
    if not is_remote(name):
        return name
    folder, file_name = parted(name)
    entries = {file_name: Place(name).entry()}
    if beside:
        entries[parted(beside)[1]] = Place(beside).entry()
    return str(copied(Place(folder), entries, cache) / file_name)


def folder_here(
    option: str, name: str, patterns: tuple[str, ...], cache: Cache, is_whole: Callable[[Path], bool]
) -> Path:
    """Return the local folder of a name: a path, a copy of the files of a store that match patterns, or a hub snapshot.

    A snapshot comes from the hub's cache if `is_whole` says that it is complete there. Raises UserError.
    """
    if is_remote(name):
        place = Place(name)
        files = chosen(place.files(), patterns)
        if not files:
            raise UserError(option, f"{name} has no file that matches {', '.join(patterns)}")
        return copied(place, files, cache)
    return Path(name) if Path(name).exists() or not HUB.fullmatch(name) else of_hub(option, name, patterns, is_whole)


def copied(place: Place, files: Mapping[str, Entry], cache: Cache) -> Path:
    """Return a folder with copies of some files of a place; raise UserError if there are none, or no room."""
    if not files:
        raise UserError(place.url, "is not there, or is empty; look at its name, and at what the account may read")
    folder = cache.folder / COPIES / named([place.url, sorted(files.items())])
    with writable("data.cache", folder):
        entry = found(folder) or made(folder, partial(fetch, place, files, cache))
        return entry.folder


def make_room(cache: Cache, url: str, size: int) -> None:
    """Delete copies that were not read recently; raise UserError if that is not enough."""
    if missing := bound(cache, size):
        problem = f"{decimal(int(cache.most_bytes))} have no room for {url}, {decimal(size)}"
        fix = f"{decimal(missing)} more are needed beyond copies read in the last {UNREAD_S // 60} minutes; raise it"
        raise UserError("data.cache_gib", f"{problem}: {fix}, or name another data.cache")


def fetch(place: Place, files: Mapping[str, Entry], cache: Cache, folder: Path) -> str:
    """Copy files into a folder of the cache; raise UserError if there is no room, or a file arrives incomplete."""
    for part in files_in(folder):  # left by a killed process
        part.unlink()
    size = sum(entry.size_bytes for entry in files.values())
    make_room(cache, place.url, size)
    if size >= LARGE:
        print(f"copying {place.url}, {decimal(size)}, to {folder.parent}", flush=True)
    for name, entry in files.items():
        place.get(name, folder / name)
        if (size := (folder / name).stat().st_size) != entry.size_bytes:
            problem = f"came with {size:,} of {entry.size_bytes:,} bytes"
            raise UserError(f"{place.url}/{name}", f"{problem}; start again when nothing writes it")
    return place.url


# ---- the hub --------------------------------------------------------------------------------------------


def of_hub(option: str, name: str, patterns: tuple[str, ...], is_whole: Callable[[Path], bool]) -> Path:
    """Return a hub model's snapshot, from the local cache if it is complete; raise UserError."""
    hub = library()
    repository, _, revision = name.partition("@")
    request = dict(repo_id=repository, revision=revision or None, allow_patterns=list(patterns))
    with suppress(Exception):  # any error means that the cache does not have it
        cached = Path(hub.snapshot_download(**request, local_files_only=True))
        if is_whole(cached):
            return cached
    try:
        snapshot = Path(hub.snapshot_download(**request))
    except Exception as error:  # from the network, the hub, or the disk
        fix = "name a folder, or set HF_TOKEN where the model is gated"
        problem = f"{name} is no local folder, is not in the hub's cache, and cannot be downloaded"
        raise UserError(option, f"{problem}: {one_line(error)}; {fix}") from error
    if not is_whole(snapshot):  # without a network it may be incomplete
        problem = f"the hub's cache has only a part of {name}, in {snapshot}"
        raise UserError(option, f"{problem}; download it if it has files that match {', '.join(patterns)}")
    print(f"{name} was downloaded to {snapshot}", flush=True)
    return snapshot


def library() -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise UserError("huggingface_hub", f"is needed for models of the hub ({error}); pip install it") from error
