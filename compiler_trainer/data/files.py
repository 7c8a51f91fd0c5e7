"""Find the files of documents: paths, folders and globs, each file once, regular and of a known kind."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.data.ids import find_index
from compiler_trainer.places.store import Place

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".npy", ".bin")


def ending(path: str) -> str | None:
    """Return the known ending of a name, or None."""
    return next((suffix for suffix in ENDINGS if path.endswith(suffix)), None)


def expand_files(patterns: Sequence[str]) -> list[str]:
    """Return the files of paths, folders and globs, in the given order; raise UserError if one cannot be read."""
    files = []
    for pattern in patterns:
        try:
            files += expand_url(pattern) if is_remote(pattern) else expand_pattern(os.path.expanduser(pattern))
        except OSError as error:
            raise UserError(shorten(pattern), f"cannot be read: {error.strerror}") from error
    check_once(files)
    return files


def expand_pattern(pattern: str) -> list[str]:
    """Return the file of a path, the files below a folder, or the sorted matches of a glob (`*`, `?`, `[...]`, `**`).

    Raises UserError if there is none.
    """
    if not pattern:
        raise UserError("data.files", "contains an empty name; give a file, a folder or a glob")
    try:
        kind = os.stat(pattern).st_mode
    except FileNotFoundError:
        return expand_glob(pattern)
    if stat.S_ISDIR(kind):
        return files_below(pattern)
    return [check_file(pattern, kind)]


def expand_glob(pattern: str) -> list[str]:
    """Return the sorted files that a glob matches."""
    if not glob.has_magic(pattern):
        raise UserError(pattern, "no such file (data.files)")
    matches = sorted(match for match in glob.glob(pattern, recursive=True) if not os.path.isdir(match))
    if not matches:
        raise UserError(pattern, "the glob matches no file (data.files)")
    return [check_file(match, os.stat(match).st_mode) for match in matches]


def expand_url(url: str) -> list[str]:
    """Return the file of a url, the files below it, or the sorted matches of a glob."""
    place = Place(url)
    if place.is_glob():
        files = [check_ending(match) for match in place.matches()]
        if not files:
            raise UserError(url, "the glob matches no file (data.files)")
        return files
    if url.startswith("http"):  # HTTP cannot list folders
        return [check_ending(url)]
    below = place.files()
    if not below:
        return [check_ending(url)]
    names = [n for n in below if ending(n) and (not n.endswith(".bin") or f"{n.removesuffix('.bin')}.idx" in below)]
    if not names:
        raise UserError(url, f"no file below it ends in {', '.join(ENDINGS)}")
    return [f"{place.url}/{name}" for name in names]


def files_below(folder: str) -> list[str]:
    """Return the sorted files with a known ending below a folder; a .bin counts only if it has an index."""
    paths = sorted(path for path in walk(folder) if ending(path) and (find_index(path) or not path.endswith(".bin")))
    if not paths:
        raise UserError(folder, f"no file below it ends in {', '.join(ENDINGS)}")
    return [check_file(path, os.stat(path).st_mode) for path in paths]


def walk(folder: str) -> Iterator[str]:
    """Yield every file below a folder; raise OSError if a folder cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (os.path.join(parent, name) for name in names)


def check_file(path: str, kind: int) -> str:
    """Return the path of a regular file of a known kind; raise UserError for others."""
    if not stat.S_ISREG(kind):
        raise UserError(path, "is not a regular file; copy its content into one")
    return check_ending(path)


def check_ending(path: str) -> str:
    """Return a path with a known ending; raise UserError for others."""
    if ending(path) is None:
        raise UserError(path, f"unknown extension {Path(path).suffix!r}; data.files takes {', '.join(ENDINGS)}")
    return path


def check_once(files: Iterable[str]) -> None:
    """Raise UserError if a file is listed twice."""
    real_paths: set[str] = set()
    for path in files:
        real = path if is_remote(path) else os.path.realpath(path)
        if real in real_paths:
            raise UserError(path, "is listed twice in data.files; each document may occur once per epoch")
        real_paths.add(real)


def shorten(name: str) -> str:
    """Return a name that fits on a line."""
    return name if len(name) <= 200 else f"{name[:100]}...{name[-20:]}"
