"""Sources of documents: the interpreter's library, files, a dataset, or a generator; each in spans, unread.

Files are given as paths, folders and globs; each is taken once, and must be regular and of a known kind.
"""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from compiler_trainer.config.errors import UserError, first_line
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.schema import SourceConfig
from compiler_trainer.data.hub_rows import is_saved, load_split, load_stream
from compiler_trainer.data.ids import find_index, map_ids, read_index
from compiler_trainer.data.readers import Span, batches_of
from compiler_trainer.places.cache import Cache
from compiler_trainer.places.copies import file_here
from compiler_trainer.places.store import Place, exists

PIECE_BYTES = 8 * 2**20  # tokenized by a process at a time
VOLUME_BYTES = 64 * 2**30  # stored, shuffled and laid out separately
STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STDLIB_SIZE_MAX_BYTES = 16 * 2**20
SYNTHETIC_MEAN_BYTES = 544


class Stamp(NamedTuple):
    """The state of a file: path, size, and time of its last change, or the number of its version in a store."""

    path: str
    size_bytes: int
    time_ns: int


class Source(NamedTuple):
    """Documents to be read: a display name, their spans in order, and the files of these."""

    where: str
    spans: list[Span]
    files: list[Stamp]

    @property
    def size_bytes(self) -> int:
        """The bytes to be read."""
        return sum(span.size_bytes for span in self.spans)

    def pieces(self) -> list[list[Span]]:
        """Return the spans in groups of about 8 MiB."""
        return runs(self.spans, PIECE_BYTES)

    def volumes(self) -> list[Source]:
        """Return the source in parts of about 64 GiB, each with the files that it reads; mostly there is one."""
        parts = runs(self.spans, VOLUME_BYTES)
        return [self] if len(parts) < 2 else [self._replace(spans=spans, files=self.files_of(spans)) for spans in parts]

    def files_of(self, spans: list[Span]) -> list[Stamp]:
        """Return the files that some spans read."""
        paths = {span.path for span in spans}
        return [file for file in self.files if file.path in paths] or self.files


def runs(spans: list[Span], size_bytes: int) -> list[list[Span]]:
    """Group neighbouring spans to about `size_bytes` each."""
    groups: list[list[Span]] = []
    room = 0
    for span in spans:
        if not groups or span.size_bytes > room:
            groups.append([])
            room = size_bytes
        groups[-1].append(span)
        room -= span.size_bytes
    return groups


def source_of(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Return the documents of `cfg`, in an order that never changes; raise UserError on bad input."""
    return SOURCES[cfg.name](cfg, seed, cache)


def stdlib_source(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Return the interpreter's own library without tests, one document per `.py` file, up to 16 MiB in total.

    Files are sorted by path.
    """
    paths, size_bytes = [], 0
    for path in stdlib_files(Path(sysconfig.get_paths()["stdlib"])):
        size_bytes += path.stat().st_size
        if size_bytes > STDLIB_SIZE_MAX_BYTES:
            break
        paths.append(str(path))
    return paths_source("data=stdlib", paths, lambda path, size: byte_spans("text", path, size))


def stdlib_files(root: Path) -> list[Path]:
    """Return the sorted `.py` files below `root`, without tests and installed packages."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def files_source(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Return the documents of files, in the given order."""
    return paths_source(", ".join(cfg.files), expand_files(cfg.files), partial(spans_of, cfg.document_separator, cache))


def spans_of(separator: str | None, cache: Cache, path: str, size: int) -> Iterable[Span]:
    """Return a file in spans, according to its ending; some kinds have to be copied to this machine for that."""
    kind = ending(path) or ""
    if kind == ".parquet":
        return row_group_spans(path)
    if kind == ".json":
        return [Span("json", path, 0, size, size)]
    if kind in SPANS:
        spans = SPANS[kind](file_here(path, cache, find_index(path) or ""))
        return [span._replace(path=path) for span in spans]
    name, _, packing = kind[1:].partition(".")
    reader = {"jsonl": "lines", "txt": "text" if separator is None else "separated"}.get(name, "csv")
    if reader == "csv" or packing:  # a border between documents is not known before everything up to it is read
        return [Span(reader if reader == "csv" else f"packed {reader}", path, 0, 1, size)]
    return byte_spans(reader, path, size)


def paths_source(where: str, paths: list[str], spans: Callable[[str, int], Iterable[Span]]) -> Source:
    """Return files as a source, each in the spans that `spans` returns for its path and size."""
    all_spans: list[Span] = []
    files = [stamp(path if is_remote(path) else os.path.abspath(path)) for path in paths]
    for file in files:
        all_spans += spans(file.path, file.size_bytes)
    return Source(where, all_spans, files)


def has_changed(file: Stamp) -> bool:
    """Return True if a file has changed or disappeared."""
    return not exists(file.path) or stamp(file.path) != file


def stamp(path: str) -> Stamp:
    """Return the current state of a file."""
    if is_remote(path):
        return Stamp(path, *Place(path).entry())
    state = os.stat(path)
    return Stamp(path, state.st_size, state.st_mtime_ns)


def byte_spans(reader: str, path: str, size: int) -> Iterator[Span]:
    """Yield a file in spans of bytes; an empty file gives one span."""
    for start in range(0, size or 1, PIECE_BYTES):
        end = min(start + PIECE_BYTES, size)
        yield Span(reader, path, start, end, end - start)


def row_group_spans(path: str) -> list[Span]:
    """Return a parquet file in spans, one per row group."""
    try:
        with Place(path).open() if is_remote(path) else open(path, "rb") as file:
            metadata = pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(path, f"is not readable parquet: {first_line(error)}") from error
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [Span("table", path, i, i + 1, group.total_byte_size) for i, group in enumerate(groups)]


def batch_spans(path: str) -> list[Span]:
    """Return an Arrow file in spans, one per record batch."""
    return [Span("arrow", path, i, i + 1, batch.nbytes) for i, batch in enumerate(batches_of(path))]


def bin_spans(path: str) -> list[Span]:
    """Return a .bin in spans of documents if it has an index, otherwise in spans of bytes of ids."""
    if find_index(path) is None:
        return list(byte_spans("array", path, os.path.getsize(path)))
    documents = len(read_index(path).documents) - 1
    return document_spans("indexed", path, documents, os.path.getsize(path))


def array_spans(path: str) -> list[Span]:
    """Return a .npy in spans of bytes of its ids."""
    return list(byte_spans("array", path, map_ids(path, np.int64).nbytes))


def document_spans(reader: str, name: str, count: int, size: int) -> list[Span]:
    """Return `count` documents of `size` bytes in total, in spans of about 8 MiB."""
    step = max(1, count * PIECE_BYTES // max(size, 1))
    starts = range(0, count, step)
    return [Span(reader, name, at, min(at + step, count), size * min(step, count - at) // count) for at in starts]


def dataset_source(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Return the rows of a dataset's split as a source."""
    name = json.dumps([cfg.path, cfg.configuration, cfg.split])
    dataset = load_split(name)
    files = [entry["filename"] for entry in dataset.cache_files]
    spans = document_spans("dataset", name, len(dataset), sum(map(os.path.getsize, files)))
    return Source(f"{cfg.path} ({cfg.split})", spans, list(map(stamp, files)))


def stream_of(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Return the documents of `cfg` as `source_of`, in spans that are read where they are; raise UserError."""
    if cfg.name == "hf_dataset" and not is_saved(cfg.path or ""):
        name = json.dumps([cfg.path, cfg.configuration, cfg.split])
        spans = [Span("shard", name, number, number + 1, 0) for number in range(load_stream(name).num_shards)]
        return Source(f"{cfg.path} ({cfg.split})", spans, [])
    for path in expand_files(cfg.files):
        if (kind := ending(path)) in UNSTREAMED and (is_remote(path) or kind in NAMED):
            streamed = ", ".join(kind for kind in IN_FOLDERS if kind not in UNSTREAMED)
            raise UserError(path, f"cannot be read in parts; data.stream reads {streamed}; convert it, or download it")
    source = source_of(cfg, seed, cache)
    return source._replace(spans=[*map(from_start, filter(is_streamed, source.spans))])


def is_streamed(span: Span) -> bool:
    """Return False for further spans of a text in a store, which is read from its start."""
    return span.start == 0 or span.reader != "text" or not is_remote(span.path)


def from_start(span: Span) -> Span:
    """Return the span of a whole text in a store; any other span as it is."""
    is_whole = span.reader == "text" and is_remote(span.path)
    return Span("packed text", span.path, 0, 1, span.size_bytes) if is_whole else span


def generator_source(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Return `data.documents` walks drawn from the seed."""
    step = PIECE_BYTES // SYNTHETIC_MEAN_BYTES
    spans = []
    for start in range(0, cfg.documents, step):
        end = min(start + step, cfg.documents)
        spans.append(Span("synthetic", str(seed), start, end, (end - start) * SYNTHETIC_MEAN_BYTES))
    return Source("data=synthetic", spans, [])


def prompts_source(cfg: SourceConfig, seed: int, cache: Cache) -> Source:
    """Raise UserError, because prompts are not text to train on."""
    raise UserError("data.name", "prompts are answered while training (loss=grpo) and have no text; use data=text")


SPANS = {".arrow": batch_spans, ".feather": batch_spans, ".bin": bin_spans, ".npy": array_spans}
SOURCES: dict[str, Callable[[SourceConfig, int, Cache], Source]] = {
    "stdlib": stdlib_source,
    "text": files_source,
    "hf_dataset": dataset_source,
    "synthetic": generator_source,
    "prompts": prompts_source,
}


# ---- finding files -------------------------------------------------------------------------------------


PACKABLE, WHOLE = (".txt", ".jsonl", ".csv", ".tsv"), (".parquet", ".arrow", ".feather", ".npy", ".bin")
IN_FOLDERS = (*(kind + packing for packing in ("", ".gz", ".zst") for kind in PACKABLE), *WHOLE)
NAMED = (".json",)  # read if named: folders of data have others, such as config.json
UNSTREAMED = (*NAMED, ".arrow", ".feather", ".npy", ".bin")  # files of stores that are only copied as a whole
KNOWN = f"{', '.join(PACKABLE)} (also with .gz or .zst), {', '.join(WHOLE)}"


def ending(path: str, endings: Sequence[str] = (*IN_FOLDERS, *NAMED)) -> str | None:
    """Return the known ending of a name, or None."""
    return next((suffix for suffix in endings if path.endswith(suffix)), None)


def is_data(path: str, has_index: bool) -> bool:
    """Return True if a file in a folder is data; a .bin is only if it has an index."""
    return ending(path, IN_FOLDERS) is not None and (has_index or not path.endswith(".bin"))


def expand_files(patterns: Sequence[str]) -> list[str]:
    """Return the files of paths, folders and globs, in the given order; raise UserError if one cannot be read."""
    files = []
    for pattern in patterns:
        try:
            files += expand_url(pattern) if is_remote(pattern) else expand_pattern(os.path.expanduser(pattern))
        except OSError as error:
            raise UserError(shorten(pattern), f"cannot be read: {error.strerror}") from error
    check_once(files)
    return files


def expand_pattern(pattern: str) -> list[str]:
    """Return the file of a path, the files below a folder, or the sorted matches of a glob (`*`, `?`, `[...]`, `**`).

    Raises UserError if there is none.
    """
    if not pattern:
        raise UserError("data.files", "contains an empty name; give a file, a folder or a glob")
    try:
        kind = os.stat(pattern).st_mode
    except FileNotFoundError:
        return expand_glob(pattern)
    if stat.S_ISDIR(kind):
        return files_below(pattern)
    return [check_file(pattern, kind)]


def expand_glob(pattern: str) -> list[str]:
    """Return the sorted files that a glob matches."""
    if not glob.has_magic(pattern):
        raise UserError(pattern, "no such file (data.files)")
    matches = sorted(match for match in glob.glob(pattern, recursive=True) if not os.path.isdir(match))
    if not matches:
        raise UserError(pattern, "the glob matches no file (data.files)")
    return [check_file(match, os.stat(match).st_mode) for match in matches]


def expand_url(url: str) -> list[str]:
    """Return the file of a url, the files below it, or the sorted matches of a glob."""
    place = Place(url)
    if place.is_glob():
        files = [check_ending(match) for match in place.matches()]
        if not files:
            raise UserError(url, "the glob matches no file (data.files)")
        return files
    if url.startswith("http"):  # HTTP cannot list folders
        return [check_ending(url)]
    below = place.files()
    if not below:
        return [check_ending(url)]
    names = [n for n in below if is_data(n, f"{n.removesuffix('.bin')}.idx" in below)]
    if not names:
        raise UserError(url, f"no file below it ends in {KNOWN}")
    return [f"{place.url}/{name}" for name in names]


def files_below(folder: str) -> list[str]:
    """Return the sorted files of data below a folder."""
    paths = sorted(path for path in walk(folder) if is_data(path, bool(find_index(path))))
    if not paths:
        raise UserError(folder, f"no file below it ends in {KNOWN}")
    return [check_file(path, os.stat(path).st_mode) for path in paths]


def walk(folder: str) -> Iterator[str]:
    """Yield every file below a folder; raise OSError if a folder cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (os.path.join(parent, name) for name in names)


def check_file(path: str, kind: int) -> str:
    """Return the path of a regular file of a known kind; raise UserError for others."""
    if not stat.S_ISREG(kind):
        raise UserError(path, "is not a regular file; copy its content into one")
    return check_ending(path)


def check_ending(path: str) -> str:
    """Return a path with a known ending; raise UserError for others."""
    if ending(path) is None:
        raise UserError(path, f"unknown extension {Path(path).suffix!r}; data.files takes {KNOWN}, {', '.join(NAMED)}")
    return path


def check_once(files: Iterable[str]) -> None:
    """Raise UserError if a file is listed twice."""
    real_paths: set[str] = set()
    for path in files:
        real = path if is_remote(path) else os.path.realpath(path)
        if real in real_paths:
            raise UserError(path, "is listed twice in data.files; each document may occur once per epoch")
        real_paths.add(real)


def shorten(name: str) -> str:
    """Return a name that fits on a line."""
    return name if len(name) <= 200 else f"{name[:100]}...{name[-20:]}"
