"""Resolve a name to a local path: a path itself, a copy of remote files, or a folder of the hub's cache.

Copies are in the cache, complete or not at all. If the cache is full, copies that were not read for long make room; a
copy that still does not fit is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.extras import library
from compiler_trainer.config.files import is_remote
from compiler_trainer.places.cache import COPIES, UNREAD_S, Cache, folder_name, shrink, writable
from compiler_trainer.places.folders import files_in, load_folder, make_folder
from compiler_trainer.places.store import Entry, Place, matching_files, split_url

LARGE = 2**28  # bytes; larger copies are announced
HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")  # organization/name, with an optional revision


def file_here(name: str, cache: Cache, beside: str = "") -> str:
    """Return the local path of a file; a remote file is copied, together with `beside` if that is given."""
    if not is_remote(name):
        return name
    folder, file = split_url(name)
    entries = {file: Place(name).entry()}
    if beside:
        entries[split_url(beside)[1]] = Place(beside).entry()
    return str(copy_files(Place(folder), entries, cache) / file)


def folder_here(
    option: str, name: str, patterns: tuple[str, ...], cache: Cache, is_whole: Callable[[Path], bool]
) -> Path:
    """Return the folder of a name: on disk, or a copy of the remote files that match `patterns`, or from the hub.

    For the hub, its cache is tried first, and `is_whole` decides whether it is complete. Raises UserError.
    """
    if is_remote(name):
        place = Place(name)
        files = matching_files(place.files(), patterns)
        if not files:
            raise UserError(option, f"{name} has no file named like {', '.join(patterns)}")
        return copy_files(place, files, cache)
    return hub_folder(option, name, patterns, is_whole) if name_on_hub(name) else Path(name)


def copy_files(place: Place, files: Mapping[str, Entry], cache: Cache) -> Path:
    """Return a folder with copies of some files of a place; raise UserError if there are none, or no room."""
    if not files:
        raise UserError(place.url, "is not there, or is empty; check its name and the permissions of the account")
    folder = cache.folder / COPIES / folder_name([place.url, sorted(files.items())])
    with writable("data.cache", folder):
        copy = load_folder(folder) or make_folder(folder, partial(fetch, place, files, cache))
        return copy.folder


def make_room(cache: Cache, url: str, size: int) -> None:
    """Delete copies that were not read for long; raise UserError if that is not enough."""
    if missing := shrink(cache, size):
        problem = f"{decimal(int(cache.most_bytes))} have no room for {url}, {decimal(size)}"
        fix = f"{decimal(missing)} more are needed; the rest was read in the last {UNREAD_S // 60} minutes; increase it"
        raise UserError("data.cache_gib", f"{problem}: {fix}, or choose another data.cache")


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
            raise UserError(f"{place.url}/{name}", f"{problem}; start again when nobody writes to it")
    return place.url


# ---- the hub --------------------------------------------------------------------------------------------


def name_on_hub(name: str) -> str | None:
    """Return organization/name, without a revision, for the name of a model of the hub; None for a folder."""
    is_name = HUB.fullmatch(name) and not Path(name).exists()
    return name.partition("@")[0] if is_name else None


hub_library = partial(library, "huggingface_hub", "huggingface_hub", "a model of the hub ")


def hub_folder(option: str, name: str, patterns: tuple[str, ...], is_whole: Callable[[Path], bool]) -> Path:
    """Return a snapshot of a model on the hub, from the hub's cache if complete; raise UserError."""
    hub = hub_library()
    repository, _, revision = name.partition("@")
    request = dict(repo_id=repository, revision=revision or None, allow_patterns=list(patterns))
    with suppress(Exception):  # any error means that the cache lacks it
        cached = Path(hub.snapshot_download(**request, local_files_only=True))
        if is_whole(cached):
            return cached
    try:
        snapshot = Path(hub.snapshot_download(**request))
    except Exception as error:  # from the network, the hub or the disk
        fix = "give a folder, or set HF_TOKEN if the model is gated"
        problem = f"{name} is neither a folder here nor in the hub's cache, and cannot be downloaded"
        raise UserError(option, f"{problem}: {one_line(error)}; {fix}") from error
    if not is_whole(snapshot):  # without a network, the snapshot is whatever the cache has
        problem = f"the hub's cache has only a part of {name}, in {snapshot}"
        raise UserError(option, f"{problem}; download it with a network, if it has files like {', '.join(patterns)}")
    print(f"{name} was downloaded to {snapshot}", flush=True)
    return snapshot
