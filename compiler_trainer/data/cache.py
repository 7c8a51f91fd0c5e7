"""Tokens on disk, made once and mapped by every process that reads them.

    <data.cache>/<key>/  tokens.bin  offsets.bin  counted.bin  corpus.json

The key depends on each file's path, size and time of change, on the tokenizer and on the options. A corpus has its
folder only once it is whole: until then `<key>.part` holds the shards that are, and a later start goes on with these.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.bar import Bar
from compiler_trainer.data.readers import Span
from compiler_trainer.data.shard import ARRAYS, Summary, join, summary_of
from compiler_trainer.data.sources import Source, stamp
from compiler_trainer.data.worker import Recipe
from compiler_trainer.data.workers import tokenize

FORMAT = 1  # of what is stored, and of what it depends on
SUMMARY = "corpus.json"


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
    try:
        kept = json.loads((folder / SUMMARY).read_text())
        return Stored(folder, Summary(*kept["holds"])) if kept["files"] == stamps(folder) else None
    except (OSError, ValueError, KeyError, TypeError):  # nothing there, cut or altered
        return None


def stamps(folder: Path) -> dict[str, list[int]]:
    """Size and time of change of each array."""
    return {file: list(stamp(str(folder / file))[1:]) for file in ARRAYS.values()}


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
            (partial / SUMMARY).write_text(json.dumps({"holds": holds, "files": stamps(partial)}))
            if folder.exists():
                print(f"{folder} was cut or altered, and is made anew", flush=True)
                shutil.rmtree(folder)
            os.rename(partial, folder)
            there = Stored(folder, holds)
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
