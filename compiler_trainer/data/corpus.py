"""All documents as one array of token ids, split into training and validation documents.

The array joins shards: the tokens of the pieces that processes tokenized, on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.pictures import ImageFile
from compiler_trainer.data.tokenizers import Tokenizer, dtype_of
from compiler_trainer.places.folders import StoredFolder

Ids = NDArray[np.int64]
DOCUMENTS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Corpus:
    """The documents: document i is `tokens[offsets[i]:offsets[i + 1]]` and ends with the `end_of_document` token.

    The arrays are in memory or mapped from disk. `fingerprint` depends on every token and boundary.
    """

    tokens: NDArray[np.unsignedinteger]  # uint16 if the vocabulary allows, else uint32
    offsets: Ids  # [documents + 1]
    end_of_document: int
    fingerprint: str
    counted: NDArray[np.bool_] | None = None  # True for tokens that are labels; None if all are
    continues: NDArray[np.bool_] | None = None  # True for documents of the same record as the previous one
    values: NDArray[np.float32] | None = None  # the number of each document, if documents have one
    images: Images | None = None  # of conversations with images

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, documents: Ids) -> Ids:
        """Return the numbers of tokens of the given documents."""
        return self.offsets[documents + 1] - self.offsets[documents]

    def is_image(self) -> NDArray[np.bool_]:
        """Return True for the tokens of images, if these have one token, repeated."""
        if self.images is None or not len(self.images.at):
            return np.zeros(len(self.tokens), bool)
        return np.asarray(self.tokens == self.tokens[self.images.at[0]])

    def image_tokens(self) -> Ids:
        """Return the number of tokens of each document that are an image's."""
        return np.asarray(np.add.reduceat(self.is_image(), self.offsets[:-1], dtype=np.int64))


class Images(NamedTuple):
    """The files of images, one after another: image i ends at byte `ends[i]`, and its first token is number `at[i]`."""

    content: NDArray[np.uint8]
    ends: Ids
    at: Ids

    def file(self, number: int) -> bytes:
        """Return the content of an image's file."""
        return self.content[self.ends[number - 1] if number else 0 : self.ends[number]].tobytes()

    def between(self, start: int, end: int) -> range:
        """Return the numbers of the images of the tokens from `start` to before `end`."""
        return range(*np.searchsorted(self.at, (start, end)).tolist())


def map_volume(
    volume: StoredFolder, tokenizer: Tokenizer, has_counted: bool, has_values: bool = False, has_images: bool = False
) -> Corpus:
    """Return the documents of a volume, mapped from disk."""
    images = [volume.array(name, dtype) for name, dtype in IMAGE_DTYPES.items()] if has_images else []
    return Corpus(
        volume.array("tokens", dtype_of(tokenizer.vocab_size)),
        np.asarray(np.memmap(volume.folder / "offsets.bin", np.int64, mode="r")),
        tokenizer.end_of_document,
        Summary(*volume.holds).digest,
        volume.array("counted", bool) if has_counted else None,
        volume.array("continues", bool) if has_counted else None,
        volume.array("values", np.float32) if has_values else None,
        Images(*images) if images else None,
    )


def split(corpus: Corpus, eval_fraction: float, documents_before: int = 0) -> tuple[Corpus, Ids, Ids]:
    """Return the corpus, its training documents and its validation documents, each ascending.

    `documents_before` is the number of documents in earlier volumes. A document is in the validation half if the hash
    of its index is below `eval_fraction`, so the split depends neither on the seed nor on the length of the corpus. If
    few documents make that half empty or far too large, the end of the longest document is cut off instead and becomes
    the validation document. Samples of one record are in the same half.
    """
    if eval_fraction in (0, 1):
        all_documents, no_documents = np.arange(len(corpus)), np.arange(0)
        return corpus, *((no_documents, all_documents) if eval_fraction else (all_documents, no_documents))
    is_validation = draw_validation(len(corpus), eval_fraction, documents_before)
    if corpus.continues is not None:
        first = np.where(corpus.continues, 0, np.arange(len(corpus)))
        is_validation = is_validation[np.maximum.accumulate(first)]
    trained, validation = np.flatnonzero(~is_validation), np.flatnonzero(is_validation)
    share = corpus.lengths(validation).sum() / len(corpus.tokens)
    if 0 < share < (1 + eval_fraction) / 2:
        return corpus, trained, validation
    if corpus.images is not None:  # no image is cut
        start = last_record(corpus, documents_before)
        return corpus, np.arange(start), np.arange(start, len(corpus))
    corpus, tail = cut_tail(corpus, eval_fraction)
    indices = np.arange(len(corpus))
    return corpus, indices[indices != tail], indices[indices == tail]


def last_record(corpus: Corpus, documents_before: int) -> int:
    """Return the first document of the last record, which is for validation, or the number of documents if none is.

    Raises UserError if it is the only record of all volumes.
    """
    starts = np.flatnonzero(~corpus.continues) if corpus.continues is not None else np.arange(len(corpus))
    if len(starts) > 1:
        return int(starts[-1])
    check_records(documents_before)
    return len(corpus)


def check_records(earlier: int) -> None:
    """Raise UserError if a volume with one record has no earlier ones, so that nothing would be left for training."""
    if not earlier:
        raise UserError("data.eval_fraction", "there is only one record, too few for validation; set it to 0")


def draw_validation(count: int, fraction: float, documents_before: int) -> NDArray[np.bool_]:
    """Return bool[count], True for validation documents."""
    is_validation = np.empty(count, bool)
    for start in range(0, count, DOCUMENTS_AT_ONCE):
        end = min(start + DOCUMENTS_AT_ONCE, count)
        is_validation[start:end] = unit_hash(np.arange(documents_before + start, documents_before + end)) < fraction
    return is_validation


def cut_tail(corpus: Corpus, eval_fraction: float) -> tuple[Corpus, int]:
    """Return the corpus with its longest document cut in two, and the index of the second part.

    That part has `eval_fraction` of the document's tokens.
    """
    lengths = np.diff(corpus.offsets)
    longest = int(lengths.argmax())
    if lengths[longest] < 4:  # each part needs a token and its target
        raise UserError(
            "data.eval_fraction", "no document is long enough to split off a validation part; set data.eval_fraction=0"
        )
    tail = np.clip(round(eval_fraction * lengths[longest]), 2, lengths[longest] - 2)
    offsets = np.insert(corpus.offsets, longest + 1, corpus.offsets[longest + 1] - tail)
    return replace(corpus, offsets=offsets), longest + 1


def unit_hash(indices: Ids) -> NDArray[np.float64]:
    """Return fixed pseudorandom numbers in [0, 1) for document indices: SplitMix64 (doi:10.1145/2660193.2660195)."""
    mixed = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64


def hash_arrays(*arrays: NDArray[np.generic]) -> str:
    """Return sixteen hex digits that depend on every byte of the arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


# ---- shards --------------------------------------------------------------------------------------------


NOTES_MOST = 40  # notes that a source keeps
# Files of a shard, and their names once joined: ids; ends of documents, int64; for conversations also the ids that
# count, bool, and the documents of the same record as the previous one, bool; for others a number a document, float32.
ARRAYS = {
    "tokens": "tokens.bin",
    "ends": "offsets.bin",
    "counted": "counted.bin",
    "continues": "continues.bin",
    "values": "values.bin",
}

# With images also their content, its ends in bytes, and their first tokens; and lines of JSON with a path, a size in
# bytes and a time of change in ns for each local file that was read.
IMAGE_DTYPES = {"images": np.uint8, "image_ends": np.int64, "image_tokens": np.int64}
IMAGE_FILES = "image_files"
IMAGE_ARRAYS = {name: f"{name}.bin" for name in IMAGE_DTYPES} | {IMAGE_FILES: f"{IMAGE_FILES}.jsonl"}

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


class Part(NamedTuple):
    """A document or a part of one: a text, or ids with their labels, and its images with their first tokens."""

    content: str | Encoded
    begins: bool
    ends: bool
    continues: bool = False  # True for a sample of the same record as the previous document
    value: float | None = None  # the number of its document
    images: tuple[bytes, ...] = ()
    image_tokens: Sequence[int] = ()
    image_files: tuple[ImageFile, ...] = ()  # of its record, in the first part of it

    @property
    def size(self) -> int:
        """The number of characters or ids."""
        return len(self.content if isinstance(self.content, str) else self.content[0])


class Shard:
    """A context manager that writes a piece's tokens, and at the end a summary, which makes the shard valid."""

    def __init__(self, folder: Path, number: int, tokenizer: Tokenizer, with_images: bool = False):
        self.stem = stem(folder, number)
        self.dtype = dtype_of(tokenizer.vocab_size)
        self.closing = np.array([tokenizer.end_of_document], self.dtype)
        self.summary, self.digest = Summary(notes={}), hashlib.blake2b(digest_size=16)
        self.files = {name: open(f"{self.stem}.{name}", "wb") for name in arrays_of(with_images)}
        self.image_bytes = 0

    def add(self, parts: Iterable[Part], encoded: Iterable[Encoded]) -> None:
        """Append documents or parts of them; documents get their closing token, and empty ones are only counted."""
        ids, counts, ends, continues, values, at = [], [], [], [], [], self.summary.tokens
        documents = empty = 0
        for part, (part_ids, counted) in zip(parts, encoded, strict=True):
            documents += part.ends
            if part.begins and part.ends and not len(part_ids):
                empty += 1
                continue
            self.add_images(part, at)
            ids += [part_ids, self.closing[: part.ends]]
            counts += [] if counted is None else [counted]
            at += len(part_ids) + part.ends
            ends += [at] * part.ends
            continues += [part.continues] * (part.ends and counted is not None)
            values += [part.value] * (part.ends and part.value is not None)
        self.write("tokens", ids, self.dtype)
        self.write("counted", counts, np.dtype(bool))
        self.write("ends", [ends], np.dtype(np.int64))
        self.write("continues", [continues], np.dtype(bool))
        self.write("values", [values], np.dtype(np.float32))
        summary = self.summary
        self.summary = summary._replace(tokens=at, documents=summary.documents + documents, empty=summary.empty + empty)

    def add_images(self, part: Part, at: int) -> None:
        """Append the images of a document whose first token is number `at`."""
        if part.images:
            ends = self.image_bytes + np.cumsum([len(image) for image in part.images])
            self.image_bytes = int(ends[-1])
            self.write("images", [np.frombuffer(image, np.uint8) for image in part.images], np.dtype(np.uint8))
            self.write("image_ends", [ends], np.dtype(np.int64))
            self.write("image_tokens", [at + np.asarray(part.image_tokens)], np.dtype(np.int64))
            self.files[IMAGE_FILES].write("".join(f"{json.dumps(file)}\n" for file in part.image_files).encode())

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


def arrays_of(with_images: bool) -> dict[str, str]:
    """Return the files of a shard, and their names once joined."""
    return ARRAYS | (IMAGE_ARRAYS if with_images else {})


def join(folder: Path, count: int, with_images: bool = False) -> Summary:
    """Join `count` shards in a folder, array by array, and remove them; return the total."""
    arrays = arrays_of(with_images)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / file, "wb")) for name, file in arrays.items()}
        files["ends"].write(np.zeros(1, np.int64).data)  # the start of the first document
        total = Summary()
        for number in range(count):
            append(folder, number, files, total.tokens)
            total = add_summaries(total, read_summary(folder, number))
    for ending in ("json", *arrays):  # a shard without its summary is made again if this process dies here
        for number in range(count):
            Path(f"{stem(folder, number)}.{ending}").unlink(missing_ok=True)
    return total


def append(folder: Path, number: int, files: Mapping[str, BinaryIO], tokens_before: int) -> None:
    """Append a shard to the joined files, which have `tokens_before` tokens so far."""
    bytes_before = files["images"].tell() if "images" in files else 0
    before = {"ends": tokens_before, "image_tokens": tokens_before, "image_ends": bytes_before}
    for name, file in files.items():
        with open(f"{stem(folder, number)}.{name}", "rb") as shard:
            if name in before:
                file.write((np.fromfile(shard, np.int64) + before[name]).data)
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
