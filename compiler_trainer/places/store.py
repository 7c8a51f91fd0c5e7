"""Files in an object store or behind https, by fsspec: s3://, gs://, https://, hf:// and what else it knows.

An object is there whole or not at all, and none can be renamed.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote

LIBRARIES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "az": "adlfs",
    "abfs": "adlfs", "hf": "huggingface_hub",
}  # fmt: skip  # what fsspec needs for a protocol
VERSIONS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "blob_id", "LastModified", "Last-Modified", "last_modified", "updated",
    "mtime", "created",
)  # fmt: skip

TRAFFIC = fsspec.Callback()  # its value grows while files of this process come and go


class Unreachable(UserError):
    """A store does not answer, or refuses."""


class Entry(NamedTuple):
    """An object: its bytes, and what is another number once the object is another."""

    size_bytes: int
    version: int


def exists(name: str) -> bool:
    """Whether there is such a file, on a disk or in a store."""
    if not is_remote(name):
        return os.path.exists(name)
    place = Place(name)
    with reached(name):
        return place.fs.exists(place.path)


def parted(url: str) -> tuple[str, str]:
    """The folder of a url, and the name in it."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder, name


@contextmanager
def reached(url: str) -> Iterator[None]:
    """Raise UserError for what goes wrong with a store: what is not installed, not there, or not reached."""
    protocol = url.partition("://")[0]
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        needed = LIBRARIES.get(protocol)
        raise UserError(url, f"needs {needed}; pip install {needed}" if needed else one_line(error)) from error
    except FileNotFoundError as error:
        raise UserError(url, "is not there; look at its name, and at what the account may read") from error
    except Exception as error:  # each library has its own
        raise Unreachable(url, f"cannot be reached: {type(error).__name__}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error says, on a line."""
    return " ".join(str(error).split())


class Place:
    """A file or folder at a url; each method raises UserError, as Unreachable where the store does not answer."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        with reached(url):
            if url.partition("://")[0] not in fsspec.available_protocols():
                raise UserError(url, f"is of no store that fsspec knows: {', '.join(LIBRARIES)} and others")
            self.fs, self.path = fsspec.core.url_to_fs(self.url)

    def entry(self) -> Entry:
        """What is at the url itself, a file; raises UserError where there is none."""
        with reached(self.url):
            self.fs.invalidate_cache()
            return entry_of(self.url, self.fs.info(self.path))

    def files(self) -> dict[str, Entry]:
        """All files below, by their names from here, sorted; none where there is no such folder."""
        with reached(self.url):
            self.fs.invalidate_cache()
            found = self.fs.find(self.path, detail=True)
            below = {path.removeprefix(self.path).lstrip("/"): info for path, info in sorted(found.items())}
            return {name: entry_of(f"{self.url}/{name}", info) for name, info in below.items() if name}

    def matches(self) -> list[str]:
        """The urls of the files that a glob matches, sorted."""
        with reached(self.url):
            self.fs.invalidate_cache()
            return sorted(self.fs.unstrip_protocol(path) for path in self.fs.glob(self.path))

    def is_glob(self) -> bool:
        """Whether the url is a pattern; in one of https `?` is none."""
        return not self.url.startswith("http") and glob.has_magic(self.path)

    def open(self) -> Any:
        """The file, to be read here and there."""
        with reached(self.url):
            return self.fs.open(self.path, "rb")

    def read(self, name: str) -> bytes:
        """A small file."""
        with reached(f"{self.url}/{name}"):
            return self.fs.cat_file(f"{self.path}/{name}")

    def get(self, name: str, to: Path) -> None:
        """Copy a file to the disk; raises UserError where its name leads out of a folder."""
        if ".." in name.split("/"):
            raise UserError(f"{self.url}/{name}", "leads out of its folder; remove it there")
        with reached(f"{self.url}/{name}"):
            to.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(f"{self.path}/{name}", str(to), callback=TRAFFIC)

    def put(self, file: Path, name: str) -> None:
        """Copy a file from the disk, which is then there as a whole."""
        with reached(f"{self.url}/{name}"):
            self.fs.makedirs(f"{self.path}/{name}".rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(file), f"{self.path}/{name}", callback=TRAFFIC)

    def remove(self, name: str) -> None:
        """Delete a file."""
        with reached(f"{self.url}/{name}"):
            self.fs.rm_file(f"{self.path}/{name}")


def entry_of(url: str, info: dict[str, Any]) -> Entry:
    """What a store says of a file."""
    if info.get("type") == "directory":
        raise UserError(url, "is a folder; name a file")
    if info.get("size") is None:
        raise UserError(url, "does not say how many bytes it has; download it, and name the file")
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
    digest = hashlib.blake2b(f"{info['size']} {version}".encode(), digest_size=7).digest()
    return Entry(int(info["size"]), int.from_bytes(digest, "big"))


def chosen(files: dict[str, Entry], patterns: tuple[str, ...]) -> dict[str, Entry]:
    """The files whose names match one of some patterns."""
    return {name: entry for name, entry in files.items() if any(fnmatch.fnmatch(name, p) for p in patterns)}
