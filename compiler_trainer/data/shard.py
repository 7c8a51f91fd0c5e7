"""The tokens of a piece on disk (a shard), and the joining of all shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.data.tokenizers import Tokenizer, dtype_of

NOTES_MOST = 40  # notes that a source keeps
# Files of a shard, and their names once joined: ids; ends of documents, int64; for conversations also the ids that
# count, bool, and the documents of the same record as the previous one, bool.
ARRAYS = {"tokens": "tokens.bin", "ends": "offsets.bin", "counted": "counted.bin", "continues": "continues.bin"}

# Ids, and True for those that are labels, with one more entry for the closing token; None if all are labels.
Encoded = tuple[NDArray[Any], NDArray[np.bool_] | None]


class Summary(NamedTuple):
    """Statistics of a shard: the `documents` that end in it, of which `empty` and `skipped` ones have no tokens.

    `notes` are remarks on its records, each with the first record that it applies to.
    """

    tokens: int = 0
    documents: int = 0
    empty: int = 0
    skipped: int = 0
    first_skipped: str | None = None
    digest: str = ""
    notes: dict[str, str] = {}


class PartBorders(Protocol):
    """The interface of a part of a document, with its borders."""

    @property
    def begins(self) -> bool: ...

    @property
    def ends(self) -> bool: ...

    @property
    def continues(self) -> bool:
        """True if it is a sample of the same record as the previous document."""


class Shard:
    """A context manager that writes a piece's tokens, and at the end a summary, which makes the shard valid."""

    def __init__(self, folder: Path, number: int, tokenizer: Tokenizer):
        self.stem = stem(folder, number)
        self.dtype = dtype_of(tokenizer.vocab_size)
        self.closing = np.array([tokenizer.end_of_document], self.dtype)
        self.summary, self.digest = Summary(notes={}), hashlib.blake2b(digest_size=16)
        self.files = {name: open(f"{self.stem}.{name}", "wb") for name in ARRAYS}

    def add(self, parts: Iterable[PartBorders], encoded: Iterable[Encoded]) -> None:
        """Append documents or parts of them; documents get their closing token, and empty ones are only counted."""
        ids, counts, ends, continues, at = [], [], [], [], self.summary.tokens
        documents = empty = 0
        for part, (part_ids, counted) in zip(parts, encoded, strict=True):
            documents += part.ends
            if part.begins and part.ends and not len(part_ids):
                empty += 1
                continue
            ids += [part_ids, self.closing[: part.ends]]
            counts += [] if counted is None else [counted]
            at += len(part_ids) + part.ends
            ends += [at] * part.ends
            continues += [part.continues] * (part.ends and counted is not None)
        self.write("tokens", ids, self.dtype)
        self.write("counted", counts, np.dtype(bool))
        self.write("ends", [ends], np.dtype(np.int64))
        self.write("continues", [continues], np.dtype(bool))
        summary = self.summary
        self.summary = summary._replace(tokens=at, documents=summary.documents + documents, empty=summary.empty + empty)

    def skip(self, where: Callable[[], str], reason: str) -> None:
        """Count a bad record."""
        first = self.summary.first_skipped or f"{where()}: {reason}"
        self.summary = self.summary._replace(skipped=self.summary.skipped + 1, first_skipped=first)

    def note(self, where: Callable[[], str], notes: Iterable[str]) -> None:
        """Add notes about a record, unless an earlier record had them."""
        for note in notes:
            if note not in self.summary.notes and len(self.summary.notes) < NOTES_MOST:
                self.summary.notes[note] = where()

    def write(self, name: str, arrays: list[Any], dtype: np.dtype[Any]) -> None:
        """Append arrays to a file."""
        if arrays:
            content = np.concatenate(arrays).astype(dtype).data
            self.files[name].write(content)
            self.digest.update(content)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for file in self.files.values():
            file.close()
        if error is None:
            unfinished = Path(f"{self.stem}.tmp")
            unfinished.write_text(json.dumps(self.summary._replace(digest=self.digest.hexdigest())))
            os.replace(unfinished, f"{self.stem}.json")


def stem(folder: Path, number: int) -> str:
    """Return the common prefix of a shard's files."""
    return str(folder / f"{number:07d}")


def read_summary(folder: Path, number: int) -> Summary | None:
    """Return the summary of a shard, or None if it is incomplete."""
    path = Path(f"{stem(folder, number)}.json")
    return Summary(*json.loads(path.read_text())) if path.exists() else None


def join(folder: Path, count: int) -> Summary:
    """Join `count` shards in a folder, array by array, and remove them; return the total."""
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / file, "wb")) for name, file in ARRAYS.items()}
        files["ends"].write(np.zeros(1, np.int64).data)  # the start of the first document
        total = Summary()
        for number in range(count):
            append(folder, number, files, total.tokens)
            total = add_summaries(total, read_summary(folder, number))
    for number in range(count):
        for ending in (*ARRAYS, "json"):
            os.unlink(f"{stem(folder, number)}.{ending}")
    return total


def append(folder: Path, number: int, files: Mapping[str, BinaryIO], tokens_before: int) -> None:
    """Append a shard to the joined files, which have `tokens_before` tokens so far."""
    for name, file in files.items():
        with open(f"{stem(folder, number)}.{name}", "rb") as shard:
            if name == "ends":
                file.write((np.fromfile(shard, np.int64) + tokens_before).data)
            else:
                shutil.copyfileobj(shard, file, 2**20)


def add_summaries(a: Summary, b: Summary | None) -> Summary:
    """Return the total of two neighbouring shards; its digest depends on both."""
    assert b is not None
    return Summary(
        a.tokens + b.tokens,
        a.documents + b.documents,
        a.empty + b.empty,
        a.skipped + b.skipped,
        a.first_skipped or b.first_skipped,
        hashlib.blake2b((a.digest + b.digest).encode(), digest_size=16).hexdigest(),
        dict(list({**b.notes, **a.notes}.items())[:NOTES_MOST]),
    )
