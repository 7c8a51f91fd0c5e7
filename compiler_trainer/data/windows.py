"""The windows of a stream: neighbouring records of its files, tokenized into a folder while a run trains on others.

A window ends with the first record at which it has enough tokens, or with the last file. Its place is the span and the
record in the span that it begins with; with the files and the options, the place decides its content. One process
reads, the files in order, and goes on where the window before ended. As a process, it answers requests for windows.

This module does not import torch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from subprocess import Popen
from threading import Lock
from typing import NamedTuple

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Part, Shard, Summary, join
from compiler_trainer.data.readers import Span
from compiler_trainer.data.records import Record
from compiler_trainer.data.sources import Source, stamp
from compiler_trainer.data.tokenizers import PART_BYTES
from compiler_trainer.data.worker import DOCUMENTS_AT_ONCE, Recipe, Worker, batches, serve
from compiler_trainer.data.workers import answer, ask, start, stored
from compiler_trainer.places.cache import Cache, folder_name, get_or_make, list_entries, writable
from compiler_trainer.places.folders import StoredFolder
from compiler_trainer.places.ranges import with_retries

FORMAT = 1  # version of the windows' files
FOLDER = "windows"  # of the cache
KEPT = 4  # newest windows on disk
LEFT_S = 86_400  # unopened time after which a window is one that an ended run left


class Place(NamedTuple):
    """The first record of a window: number `record` of span `span`, both from 0."""

    span: int = 0
    record: int = 0


BEGIN = Place()  # of the files; also the place after the last record


class WindowReader:
    """A reader of the windows of some spans, with `tokens` tokens each or slightly more."""

    def __init__(self, recipe: Recipe, spans: Sequence[Span], tokens: int):
        self.worker, self.spans, self.tokens = Worker(recipe, Path()), spans, tokens
        self.place, self.following = BEGIN, self.records(BEGIN)

    def records(self, place: Place) -> Iterator[tuple[Place, Record]]:
        """Yield each record from a place on, with the place after it; records before it in its span are not parsed."""
        for number in range(place.span, len(self.spans)):
            first = place.record if number == place.span else 0
            records = islice(self.worker.records(self.spans[number]), first, None)
            yield from ((Place(number, at + 1), record) for at, record in enumerate(records, first))

    def batches(self, shard: Shard) -> Iterator[tuple[Place, list[Part], bool]]:
        """Yield the parts of some records, with the place after them; True if no document continues after them."""
        batch, size, is_whole = list[Part](), 0, True
        for place, record in self.following:
            parts = self.worker.parts(record, shard)
            batch += parts
            size += sum(part.size for part in parts)
            is_whole = parts[-1].ends if parts else is_whole
            if size >= min(PART_BYTES, self.tokens) or len(batch) >= DOCUMENTS_AT_ONCE:
                yield place, batch, is_whole
                batch, size = [], 0
        self.following = self.records(BEGIN)
        yield BEGIN, batch, True

    def write(self, folder: str, span: int, record: int) -> Place:
        """Write the shard of the window at a place into a folder, and return the place of the next window."""
        if (span, record) != self.place:
            self.place = Place(span, record)
            self.following = self.records(self.place)
        self.place = Place(-1)  # an error leaves no place to go on from
        with writable("data.cache", Path(folder)), Shard(Path(folder), 0, self.worker.tokenizer) as shard:
            for place, parts, is_whole in self.batches(shard):
                for batch in batches(parts):
                    shard.add(batch, self.worker.encode(batch))
                if place == BEGIN or is_whole and shard.summary.tokens >= self.tokens:
                    self.place = place
                    break
        return self.place


class Windows:
    """The windows of a source on disk, each made for all ranks of a machine when one of them first needs it.

    The machine's first rank asks for windows ahead of time, and so makes them, and deletes old ones (`leads`). If it is
    lost, another rank has to make a window, and leads from then on.
    """

    def __init__(self, source: Source, recipe: Recipe, digest: str, tokens: int):
        self.source, self.recipe, self.tokens = source, recipe, tokens
        self.cache = Cache(recipe.cache.folder / FOLDER)
        self.files = {file.path: file for file in source.files}
        self.key = folder_name([FORMAT, digest, recipe.decides, source.files, source.spans, tokens])
        self.process: Popen[str] | None = None
        self.newest = deque[Path]()
        self.lock, self.leads = Lock(), os.environ.get("LOCAL_RANK", "0") == "0"

    def get(self, place: Place) -> StoredFolder:
        """Return the window at a place; raise UserError. Its facts are its summary and the place of the next window."""
        with self.lock:
            window = get_or_make(self.cache, [self.key, *place], partial(self.make, place=place))
            if self.leads:
                self.keep(window.folder)
            return window

    def keep(self, newest: Path) -> None:
        """Delete a window that is no longer among the newest ones. Whoever needs it makes it again."""
        if newest in self.newest:
            self.newest.remove(newest)
        self.newest.append(newest)
        if len(self.newest) > KEPT:
            shutil.rmtree(self.newest.popleft(), ignore_errors=True)

    def make(self, folder: Path, place: Place) -> tuple[Summary, Place]:
        """Write the window at a place into a folder, and delete windows that ended runs left."""
        for used, _, other in list_entries(self.cache.folder):
            if used < time.time() - LEFT_S and other not in (folder, *self.newest):
                shutil.rmtree(other, ignore_errors=True)
        self.leads = True
        after = self.ask(folder, place)
        last = len(self.source.spans) - 1 if after == BEGIN else after.span
        paths = {span.path for span in self.source.spans[place.span : last + 1]}
        for path in paths & self.files.keys():
            self.check_unchanged(path)
        return join(folder, 1), after

    def check_unchanged(self, path: str) -> None:
        """Raise UserError if a file has changed since the run began."""
        try:
            now = with_retries(path, partial(stamp, path))
        except OSError as error:
            raise UserError(path, f"cannot be read: {error.strerror}") from error
        if now != self.files[path]:
            raise UserError(path, "changed while it was being read; start again")

    def ask(self, folder: Path, place: Place) -> Place:
        """Let the process write a window, and return the place of the next one; raise UserError."""
        if self.process is not None and self.process.poll() is None:
            return self.answer(self.process, folder, place)
        with stored(self.recipe) as file:
            self.process = start("compiler_trainer.data.windows", file, self.source.spans, self.tokens, threads=True)
            return self.answer(self.process, folder, place)

    def answer(self, process: Popen[str], folder: Path, place: Place) -> Place:
        """Return the process's answer; without one, the next window starts another process."""
        self.process = None
        ask(process, [str(folder), *place])
        after, error = answer(process)
        self.process = process
        if error:
            raise error
        return Place(*after)


def main() -> None:
    """Answer requests for windows, each with a folder and a place, with the place of the next window."""
    serve(lambda recipe, spans, tokens: WindowReader(recipe, [Span(*span) for span in spans], tokens).write)


if __name__ == "__main__":
    main()
