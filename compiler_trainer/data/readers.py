"""Read the documents of a span: bytes of a file, row groups of a table, rows of a dataset, or generated walks.

A tokenizing process reads only spans, each independently. The borders of a byte span are moved to the next border
between documents. The neighbouring span finds the same border, so a document belongs to exactly one span. Datasets are
those of the `datasets` library (hub_rows.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from compiler_trainer.config.errors import UserError, first_line
from compiler_trainer.config.files import is_remote
from compiler_trainer.data import ids
from compiler_trainer.data.formats import columns_of, from_json, from_object, from_table_row, parse
from compiler_trainer.data.hub_rows import load_shard, load_split
from compiler_trainer.data.ids import find_index
from compiler_trainer.data.records import BYTE_ORDER_MARK, BadRecord, Document, Fields, Record, decode
from compiler_trainer.data.tokenizers import WINDOW_BYTES, Tokenizer, dtype_of, next_cut
from compiler_trainer.places.cache import Cache
from compiler_trainer.places.copies import file_here
from compiler_trainer.places.ranges import RemoteFile, opened

ROWS_AT_ONCE = 1000
CHUNK_BYTES = 2**20  # unpacked at a time
TEXT_PART_BYTES = 2**23  # of a compressed text
ROW_MOST_BYTES = 2**25  # of a CSV file


class Span(NamedTuple):
    """The range from `start` to before `end` of `path`, with `size_bytes`; `reader` is the key of its reader."""

    reader: str
    path: str
    start: int
    end: int
    size_bytes: int


class ReadOptions(NamedTuple):
    """The parameters of readers: the fields of records, the separator of texts, the tokenizer, and the cache.

    With `in_place`, remote files are read where they are, in ranges; otherwise they are copied into the cache.
    """

    fields: Fields
    separator: str | None
    tokenizer: Tokenizer
    cache: Cache  # for copies of remote files
    in_place: bool = False

    def file(self, path: str) -> str | RemoteFile:
        """Return a file's path on this machine, or the remote file to read in place."""
        return RemoteFile(path) if self.in_place and is_remote(path) else self.local_path(path)

    def content(self, path: str) -> Content:
        """Return the bytes of a file."""
        return opened(path) if self.in_place and is_remote(path) else map_file(self.local_path(path))

    def local_path(self, path: str) -> str:
        """Return a file's path on this machine."""
        return file_here(path, self.cache, find_index(path) or "")


Records = Iterator[Record]
Content = bytes | mmap.mmap | RemoteFile


# ---- bytes of files -----------------------------------------------------------------------------------


def read_text(span: Span, options: ReadOptions) -> Records:
    """Yield a file as one document, or the part of it between a span's two cuts."""
    content = map_file(options.local_path(span.path))
    step, encode = span.end - span.start, options.tokenizer.encode
    start, end = (next_cut(content, at, step, encode) if at else 0 for at in (span.start, span.end))
    if start < end or not content:
        text = content[start:end]
        yield Record(lambda: span.path, partial(part_of_text, span.path, text, start, end == len(content)))


def as_document(content: bytes, offset: int) -> Document:
    """Return a document from some bytes of a file."""
    return Document(decode(content, offset))


def read_separated(span: Span, options: ReadOptions) -> Records:
    """Yield the documents between separators in a file."""
    assert options.separator
    content = options.content(span.path)
    for at, part in split_span(content, span, options.separator.encode()):
        yield Record(partial(line_name, span.path, content, at), partial(as_document, part, at))


def read_lines(span: Span, options: ReadOptions) -> Records:
    """Yield one document per line of JSON; blank lines are skipped."""
    content = options.content(span.path)
    for at, line in split_span(content, span, b"\n"):
        if line.strip():
            yield Record(partial(line_name, span.path, content, at), partial(from_json, line, at, options.fields))


def read_json(span: Span, options: ReadOptions) -> Records:
    """Yield one document per object in a JSON list, or per line of a file without one; a list is read as a whole."""
    content = options.content(span.path)
    if not content[:CHUNK_BYTES].removeprefix(BYTE_ORDER_MARK.encode()).lstrip().startswith(b"["):
        yield from read_lines(span._replace(end=len(content)), options)
        return
    try:
        records = parse(decode(content[:], 0))
    except BadRecord as error:
        raise UserError(span.path, str(error)) from error
    for number, record in enumerate(records, start=1):
        yield Record(partial("{}: record {}".format, span.path, number), partial(from_object, record, options.fields))


def map_file(path: str) -> bytes | mmap.mmap:
    """Map the bytes of a file."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
    except OSError as error:
        raise UserError(path, f"cannot be read: {error.strerror}") from error


def split_span(content: Content, span: Span, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (position, content) of the parts between separators that begin in the span."""
    at, end = (border(content, place, separator) for place in (span.start, span.end))
    parts = content[at:end].split(separator)
    if len(parts) > 1 and not parts[-1]:  # the last separator closes a document and opens none
        parts.pop()
    for part in parts if end > at or not content else ():
        yield at, part
        at += len(part) + len(separator)


def border(content: Content, at: int, separator: bytes) -> int:
    """Return the end of the first separator from byte `at` on; the start and end of a file are borders too."""
    if at == 0 or at >= len(content):
        return at
    end = content.find(separator, at)
    return len(content) if end < 0 else end + len(separator)


def line_name(path: str, content: Content, at: int) -> str:
    """Return the name of the line that contains a byte of a file, counted from 1; the byte's, if the file is remote."""
    if isinstance(content, RemoteFile):  # to count its lines, it would be read from the start
        return f"{path}: byte {at}"
    step = 2**20
    number = 1 + sum(content[start : min(start + step, at)].count(b"\n") for start in range(0, at, step))
    return f"{path}:{number}"


# ---- compressed files ---------------------------------------------------------------------------------
#
# The borders of documents in a compressed file are unknown until it is read. So it is one span: one process reads it
# from its start and holds only the part that it tokenizes.


PACKINGS = {".gz": "gzip", ".zst": "zstd"}


@contextmanager
def unpacked(span: Span, options: ReadOptions) -> Iterator[Any]:
    """Yield a file as a stream of bytes, unpacked if its name ends in .gz or .zst; raise UserError if it is damaged."""
    try:
        compression = PACKINGS.get(os.path.splitext(span.path)[1])
        with pa.input_stream(options.file(span.path), compression=compression) as stream:
            yield stream
    except OSError as error:
        raise UserError(span.path, f"cannot be read: {first_line(error)}") from error


def read_packed(span: Span, options: ReadOptions) -> Records:
    """Yield the documents of a compressed file: one per line of JSON, or those between separators."""
    is_text = span.reader == "packed separated"
    separator = (options.separator or "").encode() if is_text else b"\n"
    with unpacked(span, options) as stream:
        at, line = 0, 1
        for part in split_stream(stream, separator):
            if is_text or part.strip():
                read = partial(as_document, part, at) if is_text else partial(from_json, part, at, options.fields)
                yield Record(partial("{}:{}".format, span.path, line), read)
            at += len(part) + len(separator)
            line += part.count(b"\n") + separator.count(b"\n")


def split_stream(stream: Any, separator: bytes) -> Iterator[bytes]:
    """Yield the parts of a stream between separators; the last separator closes a part and opens none."""
    is_first, part = True, b""
    while chunk := stream.read(max(CHUNK_BYTES, len(part))):
        *parts, part = (part + chunk).split(separator)
        yield from parts
        is_first = is_first and not parts
    if part or is_first:
        yield part


def read_packed_text(span: Span, options: ReadOptions) -> Records:
    """Yield a compressed file as one document, in parts with the tokens of the full text."""
    at, content = 0, b""
    with unpacked(span, options) as stream:
        while chunk := stream.read(max(TEXT_PART_BYTES, len(content))):
            content += chunk
            cut = next_cut(content, TEXT_PART_BYTES, TEXT_PART_BYTES, options.tokenizer.encode)
            if cut + WINDOW_BYTES <= len(content):
                yield Record(lambda: span.path, partial(part_of_text, span.path, content[:cut], at, False))
                at, content = at + cut, content[cut:]
    yield Record(lambda: span.path, partial(part_of_text, span.path, content, at, True))


def part_of_text(path: str, content: bytes, at: int, is_last: bool) -> Document:
    """Return the part of a text that begins at byte `at`; a part of several cannot be skipped."""
    try:
        return Document(decode(content, at), begins=at == 0, ends=is_last)
    except BadRecord as error:
        if at == 0 and is_last:
            raise
        raise UserError(path, str(error)) from error


# ---- rows ---------------------------------------------------------------------------------------------


def read_table(span: Span, options: ReadOptions) -> Records:
    """Yield one document per row of some row groups of a parquet file."""
    try:
        with pq.ParquetFile(options.file(span.path)) as table:
            names, columns = table.schema_arrow.names, check_columns(table.schema_arrow, span.path, options.fields)
            row = sum(table.metadata.row_group(number).num_rows for number in range(span.start))
            groups = list(range(span.start, span.end))
            for batch in table.iter_batches(ROWS_AT_ONCE, groups, columns):
                yield from rows_of(batch, span.path, row, options.fields, names)
                row += len(batch)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(span.path, f"is not readable parquet: {first_line(error)}") from error


def rows_of(batch: pa.RecordBatch, path: str, first: int, fields: Fields, names: list[str]) -> Records:
    """Yield records from the rows of a batch; the table has the columns `names`, and rows count from `first`."""
    if fields.kind == "text" and holds_ids(batch.schema.field(fields.column).type):
        rows = [{fields.column: ids} for ids in ids_in(batch.column(fields.column))]
    else:
        rows = batch.to_pylist()
    for number, row in enumerate(rows, first):
        yield Record(partial("{}: row {}".format, path, number), partial(from_table_row, row, fields, names))


def read_csv(span: Span, options: ReadOptions) -> Records:
    """Yield one document per row of a CSV or TSV file, also a compressed one; each value is a string."""
    is_tsv = span.path.removesuffix(".gz").removesuffix(".zst").endswith(".tsv")
    parsing = csv.ParseOptions(delimiter="\t" if is_tsv else ",", newlines_in_values=True)
    read = partial(
        csv.open_csv, read_options=csv.ReadOptions(use_threads=False, block_size=ROW_MOST_BYTES), parse_options=parsing
    )
    try:
        with unpacked(span, options) as stream, read(stream) as table:
            schema = pa.schema((name, pa.string()) for name in table.schema.names)
        columns, row = check_columns(schema, span.path, options.fields), 0
        conversion = csv.ConvertOptions(column_types=schema, include_columns=columns)
        with unpacked(span, options) as stream, read(stream, convert_options=conversion) as table:
            for batch in table:
                yield from rows_of(batch, span.path, row, options.fields, schema.names)
                row += len(batch)
    except pa.ArrowInvalid as error:
        raise UserError(span.path, f"is not readable CSV: {first_line(error)}") from error


def check_columns(schema: pa.Schema, path: str, fields: Fields) -> list[str]:
    """Return the columns to read from a table.

    Raises UserError unless they fit a format, each exists once, and a single one has text or token ids.
    """
    columns = columns_in(schema.names, path, fields)
    for name in columns:
        if schema.names.count(name) != 1:
            raise UserError(path, f'needs one column "{name}"; it has {", ".join(schema.names)}')
    column = fields.column
    if fields.kind == "text" and not (holds_text(kind := schema.field(column).type) or holds_ids(kind)):
        raise UserError(path, f'column "{column}" is {kind}, neither strings nor lists of token ids')
    return columns


def columns_in(names: list[str], place: str, fields: Fields) -> list[str]:
    """Return the columns to read of those of a table; raise UserError if they fit no format."""
    try:
        return columns_of(names, fields)
    except BadRecord as error:
        raise UserError(place, str(error)) from error


def holds_text(kind: pa.DataType) -> bool:
    """Return True if a column's values are strings, or bytes that may be UTF-8."""
    return kind in TEXT_TYPES or pa.types.is_dictionary(kind) and kind.value_type in TEXT_TYPES


def holds_ids(kind: pa.DataType) -> bool:
    """Return True if a column's values are lists of integers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)


def ids_in(column: pa.Array) -> Iterator[NDArray[np.generic] | None]:
    """Yield the lists of a column."""
    for value in column:
        yield value.values.to_numpy(zero_copy_only=False) if value.is_valid else None


def read_arrow(span: Span, options: ReadOptions) -> Records:
    """Yield one document per row of some record batches of an Arrow file."""
    batches = batches_of(options.local_path(span.path))
    row = sum(map(len, batches[: span.start]))
    for batch in batches[span.start : span.end]:
        columns = check_columns(batch.schema, span.path, options.fields)
        yield from rows_of(batch.select(columns), span.path, row, options.fields, batch.schema.names)
        row += len(batch)


def batches_of(path: str) -> list[pa.RecordBatch]:
    """Return the record batches of an Arrow file or stream, mapped."""
    content = pa.memory_map(path)
    try:
        table = pa.ipc.open_file(content)
        return [table.get_batch(number) for number in range(table.num_record_batches)]
    except pa.ArrowInvalid:
        content.seek(0)
    try:
        return list(pa.ipc.open_stream(content))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(path, f"is not readable Arrow: {first_line(error)}") from error


DATASET_ROWS = 1000


def read_dataset(span: Span, options: ReadOptions) -> Records:
    """Yield one document per row of a dataset."""
    dataset = load_split(span.path)
    names = dataset.column_names
    columns = columns_in(names, "data.path", options.fields)
    if absent := set(columns) - set(names):
        raise UserError("data.path", f'has no column "{min(absent)}"; there are {", ".join(names)}')
    dataset = dataset.select_columns(columns)
    for first in range(span.start, span.end, DATASET_ROWS):
        part = dataset[first : min(first + DATASET_ROWS, span.end)]
        for number, values in enumerate(zip(*(part[name] for name in columns)), first):
            where = partial("{}: row {}".format, span.path, number)
            yield Record(where, partial(from_table_row, dict(zip(columns, values)), options.fields, names))


def read_shard(span: Span, options: ReadOptions) -> Records:
    """Yield one document per row of a shard of a dataset that is not downloaded as a whole."""
    shard = load_shard(span.path, span.start)
    for number, row in enumerate(shard):
        if number == 0:
            names = shard.column_names or list(row)
            columns = columns_in(names, "data.path", options.fields)
        values = {name: row[name] for name in columns if name in row}
        yield Record(
            partial("{}: shard {}, row {}".format, span.path, span.start, number),
            partial(from_table_row, values, options.fields, names),
        )


def read_indexed(span: Span, options: ReadOptions) -> Records:
    """Return the documents of a .bin, from its index."""
    return ids.read_indexed(span.path, options.local_path(span.path), span.start, span.end)


def read_array(span: Span, options: ReadOptions) -> Records:
    """Return the documents between end-of-document tokens; raw ids have our own dtype."""
    tokenizer, local_path = options.tokenizer, options.local_path(span.path)
    dtype, closing = dtype_of(tokenizer.vocab_size), tokenizer.end_of_document
    return ids.read_array(span.path, local_path, span.start, span.end, dtype, closing)


def read_synthetic(span: Span, options: ReadOptions) -> Records:
    """Yield the walks of a seed."""
    for walk in walks(int(span.path), span.start, span.end):
        yield Record(lambda: "data.documents", partial(Document, walk))


TEXT_TYPES = (
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()
)  # fmt: skip
READERS: dict[str, Callable[[Span, ReadOptions], Records]] = {
    "text": read_text,
    "separated": read_separated,
    "lines": read_lines,
    "json": read_json,
    "packed text": read_packed_text,
    "packed separated": read_packed,
    "packed lines": read_packed,
    "csv": read_csv,
    "table": read_table,
    "arrow": read_arrow,
    "dataset": read_dataset,
    "shard": read_shard,
    "indexed": read_indexed,
    "array": read_array,
    "synthetic": read_synthetic,
}


# ---- synthetic documents -------------------------------------------------------------------------------


ALPHABET = " abcdefghijklmnopqrstuvwxyz"
SUCCESSOR_ODDS = (0.6, 0.2, 0.15, 0.05)
LENGTHS_CHARS = (64, 1024)


def walks(seed: int, start: int, end: int) -> Iterator[str]:
    """Yield walks `start` to before `end` of the chain of a seed."""
    symbols = np.arange(len(ALPHABET))
    rng = np.random.default_rng(seed)
    successors = [rng.choice(symbols, len(SUCCESSOR_ODDS), replace=False).tolist() for _ in symbols]
    for index in range(start, end):
        yield walk(successors, np.random.default_rng([seed, index]))


def walk(successors: list[list[int]], rng: np.random.Generator) -> str:
    """Return a walk of 64 to 1023 characters from a random start."""
    length = int(rng.integers(*LENGTHS_CHARS))
    state = int(rng.integers(len(successors)))
    letters = []
    for choice in rng.choice(len(SUCCESSOR_ODDS), length, p=SUCCESSOR_ODDS).tolist():
        letters.append(ALPHABET[state])
        state = successors[state][choice]
    return "".join(letters)
