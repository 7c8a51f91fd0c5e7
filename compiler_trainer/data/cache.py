"""Tokens on disk, made once and mapped by every process that reads them.

    <data.cache>/<key>/  tokens.bin  offsets.bin  counted.bin  corpus.json

The key depends on each file's path, size and time of change, on the tokenizer and on the options. A corpus has its
folder only once it is whole: until then `<key>.part` holds the shards that are, and a later start goes on with these.
Each start compares the arrays with what was written: all of a small one, blocks of a large one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from rich.filesize import decimal

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.bar import Bar
from compiler_trainer.data.readers import Span
from compiler_trainer.data.shard import ARRAYS, Summary, join, summary_of
from compiler_trainer.data.sources import Source, stamp
from compiler_trainer.data.worker import Recipe
from compiler_trainer.data.workers import tokenize

FORMAT = 3  # of what is stored, and of what it depends on
SUMMARY = "corpus.json"
BLOCKS, BLOCK_BYTES = 64, 2**20  # of an array that is larger, so many are compared, spread over it
NAME = re.compile(r"[0-9a-f]{20}(\.part)?")  # of a corpus: a cache may hold what others put there
MOST_BYTES, UNUSED_S = 256 * 2**30, 30 * 86_400  # a cache that holds more loses what was unused for so long


class Stored(NamedTuple):
    """A corpus on disk: its folder, and what it holds."""

    folder: Path
    holds: Summary

    @property
    def size_bytes(self) -> int:
        """What it takes on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def stored(source: Source, recipe: Recipe, digest: str, cache: str | None) -> Stored:
    """The tokens of a source, made where the cache has none; `digest` is the tokenizer's. Raises UserError."""
    key = [FORMAT, digest, recipe._replace(tokenizer=""), source.files, source.spans]
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()
    folder = (Path(cache).expanduser() if cache else default_cache()) / name
    try:
        return found(folder) or made(folder, source, recipe)
    except OSError as error:
        raise UserError("data.cache", f"{folder}: {error.strerror or error}; name a folder to write to") from error


def default_cache() -> Path:
    """Where tokens go unless `data.cache` says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "compiler-trainer", "tokens")


def found(folder: Path) -> Stored | None:
    """The corpus in a folder; None where there is none, or where a file is not as it was left."""
    path = folder / SUMMARY
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text())
        if kept["digest"] != digest_of(kept["holds"], kept["files"]) or kept["files"] != stamps(folder):
            return None
        with suppress(OSError):  # of others, that may only be read
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return Stored(folder, Summary(*kept["holds"]))
    except (OSError, ValueError, KeyError, TypeError):  # nothing there, cut or altered
        return None


def stamps(folder: Path) -> dict[str, list[Any]]:
    """Size, time of change and digest of each array; raises OSError where one is no file."""
    return {file: [*stamp(str(folder / file))[1:], sampled(folder / file)] for file in ARRAYS.values()}


def sampled(path: Path) -> str:
    """The digest of a file, of a large one that of blocks spread over it, its ends among them."""
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(path)
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    step = max(BLOCK_BYTES, (size - BLOCK_BYTES) / (BLOCKS - 1))
    with open(path, "rb", buffering=0) as file:
        for number in range(min(BLOCKS, -(-size // BLOCK_BYTES))):
            file.seek(round(number * step))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def digest_of(holds: Sequence[Any], files: dict[str, list[Any]]) -> str:
    """What a summary says of itself."""
    return hashlib.blake2b(json.dumps([holds, files]).encode(), digest_size=16).hexdigest()


def bound(cache: Path) -> None:
    """Delete corpora, the longest unused first, from a cache that holds too much; what was used of late stays."""
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
    times = [at.st_atime if name == SUMMARY else at.st_mtime for name, at in states.items()]
    return max(times, default=folder.stat().st_mtime), sum(at.st_size for at in states.values())


def made(folder: Path, source: Source, recipe: Recipe) -> Stored:
    """Make the corpus, unless another process does meanwhile."""
    partial = folder.with_name(f"{folder.name}.part")
    with alone(partial):
        there = found(folder)
        if there is not None:
            shutil.rmtree(partial)
        else:
            try:
                holds = tokenized(partial, source, recipe)
            except UserError:  # no later start would go on with this
                shutil.rmtree(partial)
                raise
            files = stamps(partial)
            summary = {"digest": digest_of(holds, files), "holds": holds, "files": files}
            (partial / SUMMARY).write_text(json.dumps(summary))
            if folder.exists():
                print(f"{folder} was cut or altered, and is made anew", flush=True)
                shutil.rmtree(folder)
            os.rename(partial, folder)
            there = Stored(folder, holds)
            with suppress(OSError):  # where another process deletes them too
                bound(folder.parent)
    return there


@contextmanager
def alone(partial: Path) -> Iterator[None]:
    """Keep other processes from making the same corpus: they wait, and then find it made."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that makes {partial}", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if is_at(lock, partial / "lock"):  # else the other has made the corpus, or has given up, and moved it away
                yield
                return


def is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one at a path."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def tokenized(folder: Path, source: Source, recipe: Recipe) -> Summary:
    """Make what is missing of the corpus in a folder; raises UserError where there are no tokens in all of it."""
    pieces = source.pieces()
    left = {number: spans for number, spans in enumerate(pieces) if summary_of(folder, number) is None}
    if len(left) < len(pieces):
        print(f"going on with {folder}: {len(pieces) - len(left)} of {len(pieces)} pieces are there", flush=True)
    with Bar(source.size_bytes, source.size_bytes - size_of(left.values())) as bar:
        tokenize(recipe, folder, left, lambda spans: bar.add(size_of([spans])))
    for file in source.files:
        if not os.path.exists(file.path) or stamp(file.path) != file:
            raise UserError(file.path, "has changed while it was read; start again")
    holds = join(folder, len(pieces))
    if not holds.tokens:
        skipped = f", {holds.skipped} bad ones skipped" if holds.skipped else ""
        raise UserError(source.where, f"the corpus is empty: {holds.documents} documents, none with a token{skipped}")
    return holds


def size_of(pieces: Iterable[Sequence[Span]]) -> int:
    """Bytes to read of some pieces."""
    return sum(span.size_bytes for spans in pieces for span in spans)
