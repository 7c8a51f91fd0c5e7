"""Documents from files: `.txt`, `.jsonl` and `.parquet`."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from compiler_trainer.config.errors import UserError

TEXT_COLUMN = "text"


def file_documents(patterns: Sequence[str]) -> Iterator[str]:
    """Documents of `patterns` (paths or globs) in the order listed; all files are checked before the first is read."""
    files = expand_files(patterns)
    for path in files:
        if path.suffix not in READERS:
            raise UserError(str(path), f"unknown extension {path.suffix!r}; data=text reads {', '.join(READERS)}")
    for path in files:
        try:
            yield from READERS[path.suffix](path)
        except OSError as error:
            raise UserError(str(path), f"cannot be read: {error.strerror or error}") from error


def expand_files(patterns: Sequence[str]) -> list[Path]:
    """Files named by paths and globs, each at most once; raises UserError where one is missing or listed twice."""
    files = [path for pattern in patterns for path in expand_pattern(os.path.expanduser(pattern))]
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UserError(str(path), "is listed twice in data.files; each document may come once an epoch")
        seen.add(path.resolve())
    return files


def expand_pattern(pattern: str) -> list[Path]:
    """The file a path names, or the sorted files a glob (`*`, `?`, `[...]`, `**`) matches."""
    path = Path(pattern)
    if path.is_dir():
        raise UserError(pattern, f"is a folder; name its files with a glob, e.g. {path / '*.txt'}")
    if path.exists():
        return [path]
    if not glob.has_magic(pattern):
        raise UserError(pattern, "no such file (data.files)")
    matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise UserError(pattern, "the glob matches no file (data.files)")
    return matches


def read_text(path: Path) -> str:
    """The whole file; raises UserError naming the first byte that is not UTF-8."""
    return decode(path.read_bytes(), path, offset=0)


def decode(content: bytes, path: Path, offset: int) -> str:
    """`content`, which starts `offset` bytes into the file, as text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{content[error.start]:02x} at offset {offset + error.start}"
        raise UserError(str(path), f"is not UTF-8: {bad} ({error.reason}); convert the file first") from error


def read_txt(path: Path) -> Iterator[str]:
    """One document: the whole file."""
    yield read_text(path)


def read_jsonl(path: Path) -> Iterator[str]:
    """One document a line, its field "text"; blank lines hold nothing and are passed over."""
    offset = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield jsonl_text(decode(line, path, offset), where=f"{path}:{number}")
            offset += len(line)


def jsonl_text(line: str, where: str) -> str:
    """The string under "text" in a line of JSON."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(where, f"is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict) or TEXT_COLUMN not in record:
        raise UserError(where, f'has no field "{TEXT_COLUMN}"; each line must be an object with one')
    text = record[TEXT_COLUMN]
    if not isinstance(text, str):
        raise UserError(where, f'field "{TEXT_COLUMN}" is {type(text).__name__}, not a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(where, f"holds \\u{ord(text[error.start]):04x}, half of a surrogate pair") from error
    return text


def read_parquet(path: Path) -> Iterator[str]:
    """One document a row, its column "text"."""
    try:
        with pq.ParquetFile(path) as table:
            check_text_column(table.schema_arrow, path)
            batches = table.iter_batches(columns=[TEXT_COLUMN])
            for row, text in enumerate(text for batch in batches for text in batch.column(0).to_pylist()):
                if text is None:
                    raise UserError(f"{path}: row {row}", f'column "{TEXT_COLUMN}" is null')
                yield text
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(str(path), f"is not readable parquet: {reason}") from error


def check_text_column(schema: pa.Schema, path: Path) -> None:
    """Raise UserError unless the table has one column "text", of strings."""
    if schema.names.count(TEXT_COLUMN) != 1:
        raise UserError(str(path), f'needs one column "{TEXT_COLUMN}"; it has {", ".join(schema.names)}')
    kind = schema.field(TEXT_COLUMN).type
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise UserError(str(path), f'column "{TEXT_COLUMN}" is {kind}, not string')


READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
