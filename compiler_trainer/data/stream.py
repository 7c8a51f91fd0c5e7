"""Rows of documents that are read while a run trains, window by window, without end.

A window is packed as a volume of stored tokens is, and its documents and rows are shuffled with the same seeds: a
stream whose only window has all documents gives the rows of stored tokens in the same order. After the last record, the
stream begins again with other seeds. A row's number counts all rows of its source before it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from threading import RLock, Thread
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import DataConfig, SourceConfig
from compiler_trainer.console import say
from compiler_trainer.data.corpus import Corpus, Ids, Summary, map_volume
from compiler_trainer.data.loader import Loader, LoaderState, RowsOfParts
from compiler_trainer.data.packing import Facts, Rows, of_records, pack, permutation
from compiler_trainer.data.sources import stream_of
from compiler_trainer.data.tokenizers import Tokenizer
from compiler_trainer.data.windows import BEGIN, Place, Windows
from compiler_trainer.data.worker import make_recipe
from compiler_trainer.places.cache import cache_of, folder_name

ENDLESS = 2**48  # number of a stream's rows
OPENED = 2  # windows that are open


class Position(NamedTuple):
    """The start of a window: its number, the number of its first row, and its place in the files.

    `digest` is that of its tokens, empty before they are read.
    """

    number: int = 0
    row: int = 0
    span: int = 0
    record: int = 0
    digest: str = ""

    @property
    def place(self) -> Place:
        return Place(self.span, self.record)


class Window(NamedTuple):
    """Packed documents, the order of their rows, and the positions of this window and of the next one."""

    rows: Rows
    order: Ids
    start: Position
    following: Position
    summary: Summary


class StreamRows(RowsOfParts):
    """The rows of source number `part`; `facts` has only the fingerprint.

    Each rank that asks for a row opens its window. One rank of a machine has the next window made meanwhile.
    """

    def __init__(
        self, cfg: DataConfig, source: SourceConfig, part: int, tokenizer: Tokenizer, seq_len: int, name: str
    ):
        self.cfg, self.part, self.tokenizer, self.seq_len, self.name = cfg, part, tokenizer, seq_len, name
        self.source = stream_of(source, cfg.seed, cache_of(cfg))
        recipe = make_recipe(cfg, source, tokenizer)._replace(in_place=True)
        self.windows = Windows(self.source, recipe, tokenizer.digest, cfg.stream_window)
        files = [(os.path.basename(file.path), file.size_bytes) for file in self.source.files]
        spans = [(span.reader, span.start, span.end) for span in self.source.spans]
        decides = [tokenizer.digest, recipe.decides, files, spans, cfg.stream_window, seq_len, cfg.packs]
        self.facts = Facts(0, 0, 0, 0, folder_name(decides)[:16])
        self.lock = RLock()
        self.positions, self.opened = [Position()], dict[int, Window]()  # positions of windows passed, and of the next
        self.printed: set[str] = set()

    def __len__(self) -> int:
        return ENDLESS

    def move(self, position: Position) -> None:
        """Go to the start of a window; windows stay open if it is one of those passed, or the next one."""
        with self.lock:
            if not any(known[:4] == position[:4] and position.digest in ("", known.digest) for known in self.positions):
                self.positions, self.opened = [position], {}

    def position(self, row: int) -> Position:
        """Return the position of the window of a row, or the last one before it that is known."""
        with self.lock:
            at = bisect_right(self.positions, row, key=lambda known: known.row) - 1
            if at < 0:
                raise ValueError(f"row {row} is before the window that the stream was moved to")
            return self.positions[at]

    def state(self, taken: int) -> Position:
        """Return the position of the window of row `taken`, if the rows before it were read.

        It neither depends on windows that were read ahead nor waits for one that is being read.
        """
        positions = self.positions
        at = bisect_left(positions, taken, key=lambda known: known.row)
        if at < len(positions) and positions[at].row == taken:
            return positions[at]._replace(digest="")
        return positions[at - 1]

    @property
    def current(self) -> Window:
        """The window that was opened last; the first one if there is none."""
        with self.lock:
            return next(reversed(self.opened.values())) if self.opened else self.window(self.positions[0].row)

    def window(self, row: int) -> Window:
        """Return the window of a row, which is read if needed; raise UserError."""
        with self.lock:
            window, rows_of_passes = self.open(self.position(row)), 0
            while row >= window.following.row:
                if window.following.place == BEGIN:
                    if window.following.row == rows_of_passes:
                        raise UserError(self.name, "no record has a label; give it other records")
                    rows_of_passes = window.following.row
                window = self.open(window.following)
            return window

    def open(self, position: Position) -> Window:
        """Return the window at a position."""
        if position.number in self.opened:
            return self.opened[position.number]
        corpus, summary, place = self.read(position)
        if position.digest not in ("", summary.digest):
            problem = "has other records than when the checkpoint was saved; give it the files of that time"
            raise UserError(self.name, problem)
        position = position._replace(digest=summary.digest)
        rows, order = self.arrange(corpus, position.number)
        following = Position(position.number + 1, position.row + len(order), *place)
        window = Window(rows, order, position, following, summary)
        self.remember(window)
        self.tell(window)
        return window

    def remember(self, window: Window) -> None:
        """Keep a window, and its positions if they are new; start to make the next one."""
        self.opened = {**self.opened, window.start.number: window}
        while len(self.opened) > OPENED:
            del self.opened[next(iter(self.opened))]
        first = self.positions[0].number
        self.positions[window.start.number - first] = window.start
        if window.following.number - first == len(self.positions):
            self.positions.append(window.following)
            if self.windows.leads:
                Thread(target=self.make, args=(window.following.place,), daemon=True).start()

    def tell(self, window: Window) -> None:
        """Print notes about the records of a window, and the number of bad ones, unless they were printed before."""
        bad = window.summary.skipped
        lines = [f"note: {self.name}: {note} (first: {place})" for note, place in window.summary.notes.items()]
        first = f"the first is {window.summary.first_skipped}"
        lines += [f"{self.name}: {bad:,} bad records of window {window.start.number} are skipped, {first}"] * bool(bad)
        for line in lines:
            key = line.partition(" (first: ")[0]
            if key not in self.printed and os.environ.get("RANK", "0") == "0":
                say(line)
            self.printed.add(key)

    def make(self, place: Place) -> None:
        """Have a window made ahead of time; whoever needs it meets its error again."""
        try:
            self.windows.get(place)
        except (UserError, OSError, RuntimeError):
            return

    def read(self, position: Position) -> tuple[Corpus, Summary, Place]:
        """Return a window's documents, their summary, and the place of the next window."""
        has = self.cfg.has_counted, self.cfg.has_values
        while True:
            folder = self.windows.get(position.place)
            summary, place = folder.holds
            with suppress(FileNotFoundError):  # the first rank may be far ahead, and delete it at this moment
                return map_volume(folder, self.tokenizer, *has), Summary(*summary), Place(*place)

    def arrange(self, corpus: Corpus, number: int) -> tuple[Rows, Ids]:
        """Return the packed documents of window `number`, and the order of their rows."""
        documents = np.arange(len(corpus))
        np.random.default_rng([self.cfg.seed, self.part, *([number] if number else [])]).shuffle(documents)
        rows = of_records(pack(corpus, documents, self.seq_len, self.cfg.packs), self.cfg)
        return rows, permutation(len(rows), [self.cfg.seed, self.part, number], None)

    def by_part(self, rows: Ids) -> Iterator[tuple[Rows, NDArray[np.bool_], Ids]]:
        """Yield the windows of some rows in order, bool[rows] of each, and their numbers in it."""
        row = int(rows.min())
        while True:
            window = self.window(row)
            mine = (rows >= window.start.row) & (rows < window.following.row)
            yield window.rows, mine, window.order[rows[mine] - window.start.row]
            later = rows[rows >= window.following.row]
            if not len(later):
                return
            row = int(later.min())

    def describe(self) -> str:
        """Return the size of the files, and the place of the next window, as text."""
        files, spans = len(self.source.files), len(self.source.spans)
        size = f"{files:,} files, {decimal(self.source.size_bytes)}" if files else f"{spans:,} shards"
        return f"{self.name}: read while training, {size}, in windows of {self.cfg.stream_window:,} tokens"


class StreamLoader(Loader):
    """Endless batches of streams, whose windows have orders of their own."""

    def reset(self) -> None:
        """Go back to the first row of every source."""
        super().reset()
        for part in self.streams:
            part.move(Position())

    @property
    def streams(self) -> Iterator[StreamRows]:
        """The rows of each source."""
        return (part for part in self.rows.parts if isinstance(part, StreamRows))

    def open(self) -> None:
        """Read the window of each source's next row; raise UserError."""
        for part, taken in zip(self.streams, self.rows_taken):
            part.window(taken)

    def _rows(self, part: int, numbers: Ids) -> Ids:
        """Return the rows of a part, which are in order."""
        return numbers + self.rows.firsts[part]

    def state_dict(self) -> LoaderState:
        """Return the state from which `load_state_dict` continues, with the window of each source's next row."""
        windows = [list(part.state(taken)) for part, taken in zip(self.streams, self.rows_taken)]
        return {**super().state_dict(), "windows": windows}

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from `state`, at any batch size; raise UserError, KeyError or ValueError as `Loader` does."""
        super().load_state_dict(state)
        for part, values, taken in zip(self.streams, state["windows"], self.rows_taken, strict=True):
            part.move(read_position(values, taken))


def read_position(values: Any, taken: int) -> Position:
    """Return the position of the window of row `taken` from its JSON; raise ValueError if it is not one."""
    if not isinstance(values, list | tuple) or [type(value) for value in values] != [int, int, int, int, str]:
        raise ValueError(f"{values} is not the position of a window: four numbers and a digest")
    position = Position(*values)
    if min(position[:4]) < 0 or position.row > taken:
        raise ValueError(f"{values} is not the position of a window that has row {taken}")
    return position
