"""Read token ids made by other tools: Megatron's .bin with its .idx, numpy arrays, and raw ids, as in a memory map.

Without an index, documents are separated by end-of-document tokens.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import Document, Record
from compiler_trainer.places.store import exists

MAGIC, HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, documents + 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # megatron/core/datasets/indexed_dataset.py
IDS_AT_ONCE = 2**20
FEWEST, FIRST = 16, 1000  # ids of a raw file, by which a wider dtype is known


class Index(NamedTuple):
    """The index of a .bin: document i has the sequences from `documents[i]` to before `documents[i + 1]`.

    Each sequence has its size in `sizes` and its first byte in `pointers`.
    """

    dtype: np.dtype[Any]
    sizes: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]


def find_index(path: str) -> str | None:
    """Return the path of a .bin's index, or None if there is none."""
    index = f"{path.removesuffix('.bin')}.idx"
    return index if path.endswith(".bin") and exists(index) else None


def read_index(path: str) -> Index:
    """Read the index that Megatron wrote for a .bin; raise UserError if it is invalid."""
    name = find_index(path) or path
    try:
        content = np.memmap(name, np.uint8, mode="r")
        magic, version, code, sequences, bounds = HEADER.unpack(content[: HEADER.size].tobytes())
        if magic != MAGIC or version != 1 or code not in DTYPES:
            raise ValueError(f"{magic!r}, version {version}, dtype {code}")
        places = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * bounds])
        arrays = [content[a:b] for a, b in zip(places, places[1:])]
        index = Index(np.dtype(DTYPES[code]), *(a.view(kind) for a, kind in zip(arrays, ("<i4", "<i8", "<i8"))))
        if len(index.documents) != bounds or index.documents[-1] != sequences:
            raise ValueError(f"its documents do not end with its {sequences:,} sequences")
        end = int((index.pointers + index.dtype.itemsize * index.sizes.astype(np.int64)).max(initial=0))
        if path != name and Path(path).exists() and end > (size := Path(path).stat().st_size):
            raise ValueError(f"{path} has {size:,} of {end:,} bytes; it was truncated")
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise UserError(name, f"is not an index of Megatron: {error}") from error
    return index


def read_indexed(path: str, local_path: str, start: int, end: int) -> Iterator[Record]:
    """Yield documents `start` to before `end` of a .bin, whose local copy is `local_path`."""
    index = read_index(local_path)
    content = np.memmap(local_path, np.uint8, mode="r")
    for number in range(start, end):
        yield Record(partial("{}: document {}".format, path, number), partial(read_document, content, index, number))


def read_document(content: NDArray[np.uint8], index: Index, number: int) -> Document:
    """Return a document of a .bin."""
    sequences = range(index.documents[number], index.documents[number + 1])
    size = index.dtype.itemsize
    parts = [content[at : at + size * n] for at, n in ((index.pointers[s], int(index.sizes[s])) for s in sequences)]
    return Document(np.concatenate(parts or [content[:0]]).view(index.dtype))


def map_ids(path: str, dtype: DTypeLike) -> NDArray[np.integer]:
    """Map the ids of a file: of a .npy in its own dtype, otherwise in `dtype`; raise UserError if it has none."""
    try:
        if path.endswith(".npy"):
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        elif os.path.getsize(path):
            ids = np.memmap(path, dtype, mode="r")
        else:
            ids = np.empty(0, dtype)
    except (OSError, ValueError) as error:
        raise UserError(path, f"cannot be read as {np.dtype(dtype)} ids: {error}") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(path, f"is {ids.dtype}{list(ids.shape)}; ids must be integers in one dim")
    return np.asarray(ids)


def read_array(path: str, local_path: str, start: int, end: int, dtype: DTypeLike, closing: int) -> Iterator[Record]:
    """Yield the documents that begin from byte `start` to before byte `end` of a file's ids.

    `local_path` is the file's local copy.
    """
    ids = map_ids(local_path, dtype)
    if not path.endswith(".npy"):
        check_width(ids[:FIRST], path)
    at, last = (
        next(document_ends(ids, place // ids.itemsize, len(ids), closing)) if place else 0 for place in (start, end)
    )
    for document_end in document_ends(ids, at, last, closing):
        if document_end > at:
            yield Record(partial("{}: token {}".format, path, at), partial(Document, ids[at:document_end]))
        at = document_end


def check_width(ids: NDArray[np.integer], path: str) -> None:
    """Raise UserError if the first ids of a raw file look like those of a wider dtype."""
    if len(ids) >= FEWEST and not ids[1::2].any():
        problem = f"is read as {ids.dtype}, but every second of its first {len(ids):,} ids is 0, as of a wider dtype"
        raise UserError(path, f"{problem}; write ids.astype(numpy.{ids.dtype}), or a .npy, which names its dtype")


def document_ends(ids: NDArray[np.integer], start: int, last: int, closing: int) -> Iterator[int]:
    """Yield the ends of documents from token `start` to `last`, which is also an end."""
    for at in range(start, last, IDS_AT_ONCE):
        yield from (at + 1 + np.flatnonzero(ids[at : min(at + IDS_AT_ONCE, last)] == closing)).tolist()
    yield last
