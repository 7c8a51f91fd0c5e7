"""Which files hold the documents: paths, folders and globs, each file there once, regular and of a known kind."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.data.ids import index_beside
from compiler_trainer.places.store import Place

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".npy", ".bin")


def ending(path: str) -> str | None:
    """Which of the known endings a name has."""
    return next((known for known in ENDINGS if path.endswith(known)), None)


def expand_files(patterns: Sequence[str]) -> list[str]:
    """Files named by paths, folders and globs, in the order listed; raises UserError where one cannot be read."""
    files = []
    for pattern in patterns:
        try:
            files += in_store(pattern) if is_remote(pattern) else expand_pattern(os.path.expanduser(pattern))
        except OSError as error:
            raise UserError(shortened(pattern), f"cannot be read: {error.strerror}") from error
    check_once(files)
    return files


def expand_pattern(pattern: str) -> list[str]:
    """The file a path names, the files below a folder, or the sorted files a glob (`*`, `?`, `[...]`, `**`) matches."""
    if not pattern:
        raise UserError("data.files", "holds an empty name; name a file, a folder or a glob")
    try:
        kind = os.stat(pattern).st_mode
    except FileNotFoundError:
        return expand_glob(pattern)
    if stat.S_ISDIR(kind):
        return files_below(pattern)
    return [checked(pattern, kind)]


def expand_glob(pattern: str) -> list[str]:
    """The sorted files a glob matches."""
    if not glob.has_magic(pattern):
        raise UserError(pattern, "no such file (data.files)")
    matches = sorted(match for match in glob.glob(pattern, recursive=True) if not os.path.isdir(match))
    if not matches:
        raise UserError(pattern, "the glob matches no file (data.files)")
    return [checked(match, os.stat(match).st_mode) for match in matches]


def in_store(url: str) -> list[str]:
    """The file that a url names, the files below a folder there, or the sorted files that a glob matches."""
    place = Place(url)
    if place.is_glob():
        found = [checked_ending(match) for match in place.matches()]
        if not found:
            raise UserError(url, "the glob matches no file (data.files)")
        return found
    if url.startswith("http"):  # which lists no folders
        return [checked_ending(url)]
    below = place.files()
    if not below:
        return [checked_ending(url)]
    names = [n for n in below if ending(n) and (not n.endswith(".bin") or f"{n.removesuffix('.bin')}.idx" in below)]
    if not names:
        raise UserError(url, f"no file below it ends in {', '.join(ENDINGS)}")
    return [f"{place.url}/{name}" for name in names]


def files_below(folder: str) -> list[str]:
    """Sorted files with a known ending below a folder; a .bin may be anything, but for one with an index."""
    found = sorted(path for path in walk(folder) if ending(path) and (index_beside(path) or not path.endswith(".bin")))
    if not found:
        raise UserError(folder, f"no file below it ends in {', '.join(ENDINGS)}")
    return [checked(path, os.stat(path).st_mode) for path in found]


def walk(folder: str) -> Iterator[str]:
    """Every file below a folder; raises OSError where a folder cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for inner, _, names in os.walk(folder, onerror=refuse):
        yield from (os.path.join(inner, name) for name in names)


def checked(path: str, kind: int) -> str:
    """The path of a regular file of a known kind; raises UserError for another."""
    if not stat.S_ISREG(kind):
        raise UserError(path, "is not a regular file; copy what it gives into one")
    return checked_ending(path)


def checked_ending(path: str) -> str:
    """The path of a file of a known kind; raises UserError for another."""
    if ending(path) is None:
        raise UserError(path, f"unknown extension {Path(path).suffix!r}; data.files takes {', '.join(ENDINGS)}")
    return path


def check_once(files: Iterable[str]) -> None:
    """Raise UserError where a file is listed twice."""
    seen: set[str] = set()
    for path in files:
        real = path if is_remote(path) else os.path.realpath(path)
        if real in seen:
            raise UserError(path, "is listed twice in data.files; each document may come once an epoch")
        seen.add(real)


def shortened(name: str) -> str:
    """A name that fits on a line."""
    return name if len(name) <= 200 else f"{name[:100]}...{name[-20:]}"
