"""Files in an object store or behind https, through fsspec: s3://, gs://, https://, hf:// and its other protocols.

An object exists completely or not at all, and cannot be renamed.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from compiler_trainer.config.earlier import tell
from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.files import is_remote

LIBRARIES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "az": "adlfs",
    "abfs": "adlfs", "hf": "huggingface_hub",
}  # fmt: skip  # the library that fsspec needs for a protocol
VERSIONS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "LastModified", "Last-Modified", "last_modified", "updated",
    "mtime", "modificationTime", "modified", "created", "sha",
)  # fmt: skip
ON_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # errors that only a write to a disk can have

TRAFFIC = fsspec.Callback()  # its value grows while this process transfers files


class Unreachable(UserError):
    """A store does not answer, or refuses access."""


class Entry(NamedTuple):
    """An object: its size in bytes, and a number that changes with its content."""

    size_bytes: int
    version: int


def exists(name: str) -> bool:
    """Return True if a file exists, on disk or in a store."""
    if not is_remote(name):
        return os.path.exists(name)
    place = Place(name)
    with store_errors(name):
        return place.fs.exists(place.path)


def split_url(url: str) -> tuple[str, str]:
    """Return the folder of a url, and the name in it."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder, name


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn errors of a store into UserError: a missing library, a missing file, or no connection."""
    protocol = url.partition("://")[0]
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        package = LIBRARIES.get(protocol)
        raise UserError(url, f"needs {package}; pip install {package}" if package else one_line(error)) from error
    except FileNotFoundError as error:
        raise UserError(url, "is not there; check its name and the permissions of the account") from error
    except Exception as error:  # each library has its own errors
        raise Unreachable(url, f"cannot be reached: {type(error).__name__}: {one_line(error)}") from error


class Place:
    """A file or folder at a url; methods raise UserError, or Unreachable if the store does not answer."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        with store_errors(url):
            if url.partition("://")[0] not in fsspec.available_protocols():
                raise UserError(url, f"is not in a store that fsspec knows: {', '.join(LIBRARIES)} and others")
            self.fs, self.path = fsspec.core.url_to_fs(self.url)

    def entry(self) -> Entry:
        """Return the file at the url itself; raise UserError if there is none."""
        with store_errors(self.url):
            self.fs.invalidate_cache()
            return entry_of(self.url, self.fs.info(self.path))

    def files(self) -> dict[str, Entry]:
        """Return all files below, by their relative names, sorted; empty if there is no such folder."""
        with store_errors(self.url):
            self.fs.invalidate_cache()
            infos = self.fs.find(self.path, detail=True)
            below = {path.removeprefix(self.path).lstrip("/"): info for path, info in sorted(infos.items())}
            return {name: entry_of(f"{self.url}/{name}", info) for name, info in below.items() if name}

    def matches(self) -> list[str]:
        """Return the urls of the files that a glob matches, sorted."""
        with store_errors(self.url):
            self.fs.invalidate_cache()
            return sorted(self.fs.unstrip_protocol(path) for path in self.fs.glob(self.path))

    def is_glob(self) -> bool:
        """Return True if the url is a pattern; in https urls, `?` is not one."""
        return not self.url.startswith("http") and glob.has_magic(self.path)

    def open(self) -> Any:
        """Return the file, opened for random access."""
        with store_errors(self.url):
            return self.fs.open(self.path, "rb")

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with store_errors(f"{self.url}/{name}"):
            return self.fs.cat_file(f"{self.path}/{name}")

    def get(self, name: str, to: Path) -> None:
        """Copy a file to disk; raise UserError if its name leads out of the folder, or if the disk refuses it."""
        if ".." in name.split("/"):
            raise UserError(f"{self.url}/{name}", "leads out of its folder; remove it there")
        with store_errors(f"{self.url}/{name}"):
            try:
                to.parent.mkdir(parents=True, exist_ok=True)
                self.fs.get_file(f"{self.path}/{name}", str(to), callback=TRAFFIC)
            except OSError as error:
                if error.errno in ON_DISK or to.is_relative_to(str(error.filename)):
                    problem = f"cannot be written: {error.strerror}; free some space, or choose another folder"
                    raise UserError(str(to), problem) from error
                raise

    def put(self, file: Path, name: str) -> None:
        """Copy a file from disk; it then exists completely."""
        with store_errors(f"{self.url}/{name}"):
            self.fs.makedirs(f"{self.path}/{name}".rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(file), f"{self.path}/{name}", callback=TRAFFIC)

    def remove(self, name: str) -> None:
        """Delete a file."""
        with store_errors(f"{self.url}/{name}"):
            self.fs.rm_file(f"{self.path}/{name}")


def entry_of(url: str, info: dict[str, Any]) -> Entry:
    """Return the entry of a file from a store's information."""
    if info.get("type") == "directory":
        raise UserError(url, "is a folder; name a file")
    if info.get("size") is None:
        raise UserError(url, "does not say how many bytes it has; download it, and name the file")
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
    if not version:
        store = "/".join(url.split("/")[:3])
        tell(f"{store} does not say when files changed: a copy of a file is kept as long as its size stays the same")
    digest = hashlib.blake2b(f"{info['size']} {version}".encode(), digest_size=7).digest()
    return Entry(int(info["size"]), int.from_bytes(digest, "big"))


def matching_files(files: dict[str, Entry], patterns: tuple[str, ...]) -> dict[str, Entry]:
    """Return the files whose names match one of the patterns."""
    return {name: entry for name, entry in files.items() if any(fnmatch.fnmatch(name, p) for p in patterns)}
