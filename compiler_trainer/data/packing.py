"""Documents packed into rows (training sequences) of equal length: end to end and cut, or fitted in uncut.

Rows are made on demand. A volume's documents are laid out once per machine: the layout is stored on disk and mapped by
each rank. Fitting is best-fit-decreasing bin packing, fast enough for all pieces of a corpus. The rows of preference
pairs are two documents each, the chosen and the rejected answer with their prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ANSWER_REFERENCE, PASSAGES, REFERENCE, DataConfig
from compiler_trainer.data.corpus import Corpus, Ids, check_records, draw_validation, hash_arrays, split
from compiler_trainer.data.layout import PADDING, Layout, with_images
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.loss import PADDING_DOCUMENT
from compiler_trainer.places.cache import Cache, get_or_make
from compiler_trainer.places.folders import StoredFolder


class Facts(NamedTuple):
    """Statistics of packed documents.

    `cut_documents` have labels in several rows; `row_tokens` tokens of all rows belong to documents.
    """

    documents: int
    tokens: int
    cut_documents: int
    row_tokens: int
    fingerprint: str


class Rows(Protocol):
    """The interface of rows of `seq_len` tokens, made on demand."""

    seq_len: int
    facts: Facts

    def __len__(self) -> int: ...

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return `tokens`, `labels`, `positions` and `documents` of the rows numbered `rows`, one or more.

        All are int64 [len(rows), seq_len]. Positions count from 0 at each document's first token in the row. Documents
        are numbered from 0 in the row; padding has document -1. If documents have numbers, `values`, fp32 [len(rows),
        seq_len], is that of each token's document.
        """

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits, or several such groups, that depend on every row."""
        return self.facts.fingerprint

    @property
    def padding(self) -> float:
        """The share of all rows that is padding."""
        return 1 - self.facts.row_tokens / (len(self) * self.seq_len)

    @property
    def cut_share(self) -> float:
        """The share of documents whose labels are in several rows."""
        return self.facts.cut_documents / self.facts.documents


class OfRows(Rows):
    """Rows made of other rows, one of each."""

    def __init__(self, rows: Rows):
        self.rows, self.seq_len, self.facts = rows, rows.seq_len, rows.facts

    def __len__(self) -> int:
        return len(self.rows)

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        return self.rows.token_counts(rows)


class PackedRows(Rows):
    """Rows of `seq_len` tokens of a corpus, as a layout arranges them; no token is an input of two rows.

    Each token that counts is the label of exactly one position, except the first token of each document: no token of
    its document precedes it, so the position before it has the label -100. Padding has end-of-document tokens with the
    label -100. Rows without any label are left out.
    """

    def __init__(self, corpus: Corpus, layout: Layout, seq_len: int, facts: Facts):
        self.corpus, self.layout, self.seq_len, self.facts = corpus, layout, seq_len, facts

    def __len__(self) -> int:
        return len(self.layout.rows)

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        ends = (self.layout.rows[rows] + 1) * self.seq_len
        last = self._pieces(ends - 1)
        return np.where(self.layout.sources[last] == PADDING, self.layout.starts[last], ends) - ends + self.seq_len

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return `tokens`, `labels`, `positions` and `documents` of some rows."""
        layout, row_starts = self.layout, self.layout.rows[rows] * self.seq_len
        piece = self._pieces_of(row_starts)
        at = row_starts[:, None] + np.arange(self.seq_len)
        source = at - layout.starts[piece] + layout.sources[piece]
        is_padding = layout.sources[piece] == PADDING
        has_label = ~is_padding & ((at + 1 < layout.starts[piece + 1]) | layout.continues[piece])
        if self.corpus.counted is not None:
            has_label &= self.corpus.counted.take(source + 1, mode="clip")
        entries: dict[str, NDArray[Any]] = {
            "tokens": np.where(is_padding, self.corpus.end_of_document, self._tokens(source)),
            "labels": np.where(has_label, self._tokens(source + 1), IGNORED_LABEL),
            "positions": at - np.maximum(layout.starts[piece], row_starts[:, None]),
            "documents": np.where(is_padding, PADDING_DOCUMENT, piece - piece[:, :1]),
        }
        return entries | ({} if self.corpus.values is None else {"values": self._values(piece)})

    def _values(self, piece: Ids) -> NDArray[np.float32]:
        """Return the number of each piece's document; that of padding is arbitrary."""
        assert self.corpus.values is not None
        document = np.searchsorted(self.corpus.offsets, self.layout.sources[piece], side="right") - 1
        return self.corpus.values.take(document, mode="clip")

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Return the corpus tokens of each document of a row, as (start, end)."""
        start = self.layout.rows[row] * self.seq_len
        first, last = self._pieces(np.array([start, start + self.seq_len - 1]))
        pieces = ((int(self.layout.sources[i]), self.layout.starts[i : i + 2]) for i in range(first, last + 1))
        return [(source, source + int(ends[1] - ends[0])) for source, ends in pieces if source != PADDING]

    def _pieces(self, at: Ids) -> Ids:
        """Return the pieces at some positions of the stream."""
        return np.searchsorted(self.layout.starts, at, side="right") - 1

    def _pieces_of(self, row_starts: Ids) -> Ids:
        """Return the piece of each token of some rows, [len(row_starts), seq_len]."""
        first, last = self._pieces(row_starts), self._pieces(row_starts + self.seq_len - 1)
        counts = last - first + 1
        row = np.repeat(np.arange(len(counts)), counts)
        piece = first[row] + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        begins = np.maximum(self.layout.starts[piece], row_starts[row])
        ends = np.minimum(self.layout.starts[piece + 1], row_starts[row] + self.seq_len)
        return np.repeat(piece, ends - begins).reshape(-1, self.seq_len)

    def _tokens(self, source: Ids) -> Ids:
        """Return tokens of the corpus; beyond its ends they are arbitrary."""
        return self.corpus.tokens.take(source, mode="clip").astype(np.int64)


def pack(
    corpus: Corpus, order: Ids, seq_len: int, packing: str = "cut", images: int = 0, image_tokens: int = 0
) -> PackedRows:
    """Return the rows of the documents `order`, packed as `packing` says, with the layout in memory.

    With `images`, a row has whole documents with at most that many images, and with `image_tokens` tokens of these.
    """
    if images:
        layout = with_images(corpus, order, seq_len, images, image_tokens)
    else:
        layout = LAYOUTS[packing](corpus, order, seq_len)
    content = order if packing == "cut" else layout.sources
    fingerprint = hash_arrays(np.array([seq_len]), content, np.frombuffer(corpus.fingerprint.encode(), np.uint8))
    row_tokens = len(layout.rows) * seq_len - padding_of(layout, seq_len)
    facts = Facts(len(order), int(corpus.lengths(order).sum()), layout.cut_documents, row_tokens, fingerprint)
    return PackedRows(corpus, layout, seq_len, facts)


def padding_of(layout: Layout, seq_len: int) -> int:
    """Return the number of padding tokens in all rows."""
    pads = np.flatnonzero(layout.sources == PADDING)
    sizes = layout.starts[pads + 1] - layout.starts[pads]
    return int(sizes[np.isin(layout.starts[pads] // seq_len, layout.rows)].sum())


# ---- layouts -------------------------------------------------------------------------------------------


TOKENS_AT_ONCE = 2**22


def cut(corpus: Corpus, order: Ids, seq_len: int) -> Layout:
    """Lay documents end to end: each begins where the previous one ends, and continues in the next row."""
    sources = corpus.offsets[order]
    lengths = corpus.offsets[order + 1] - sources
    padding = -lengths.sum() % seq_len
    starts = np.concatenate(([0], np.cumsum(np.append(lengths, padding))))
    first, tokens = starts[:-2], int(starts[-2])
    rows = np.arange(-(-(tokens - 1) // seq_len))  # a row with only the stream's last token would have no label
    if corpus.counted is not None:
        rows = np.flatnonzero(rows_with_label(corpus, order, first, starts[-1] // seq_len, seq_len))
    is_cut = first // seq_len != (first + np.maximum(lengths - 2, 0)) // seq_len
    return Layout(starts, np.append(sources, PADDING), np.zeros(len(order) + 1, bool), rows, int(is_cut.sum()))


def fit(corpus: Corpus, order: Ids, seq_len: int) -> Layout:
    """Fit documents into rows with little padding; longer documents fill rows, and their remainders are fitted in.

    In a row, documents keep the order of `order`. Rows are in the order of the pieces that opened them, which are their
    longest.
    """
    sources, lengths, remaining = cut_pieces(corpus, order, seq_len)
    openers = best_fit(lengths, seq_len)
    row = (np.cumsum(openers == np.arange(len(lengths))) - 1)[openers]
    room = seq_len - np.bincount(row, lengths).astype(np.int64)
    padded = np.flatnonzero(room)
    arranged = np.argsort(np.concatenate((row, padded)), kind="stable")  # padding comes last in its row
    return Layout(
        np.concatenate(([0], np.cumsum(np.concatenate((lengths, room[padded]))[arranged]))),
        np.concatenate((sources, np.full(len(padded), PADDING)))[arranged],
        np.concatenate((remaining > lengths, np.zeros(len(padded), bool)))[arranged],
        np.arange(len(room)),
        int((corpus.lengths(order) > seq_len + 1).sum()),
    )


def groups(name: str, skip: bool, corpus: Corpus, order: Ids, seq_len: int) -> Layout:
    """Lay out one record per row: its documents have neighbouring numbers, of which the first divides by their count.

    Those of a pair are a chosen answer and its rejected one. Records longer than a row are skipped with `skip`;
    otherwise they raise UserError.
    """
    count = TOGETHER[name]
    documents = order[order % count == 0][:, None] + np.arange(count)
    lengths = corpus.lengths(documents)
    fits = too_long(name, skip, lengths.sum(1), seq_len)
    documents, lengths = documents[fits], lengths[fits]
    sources = np.pad(corpus.offsets[documents], ((0, 0), (0, 1)), constant_values=PADDING).ravel()
    sizes = np.concatenate((lengths, seq_len - lengths.sum(1, keepdims=True)), 1).ravel()
    nonempty = sizes > 0
    starts = np.concatenate(([0], np.cumsum(sizes[nonempty])))
    skipped = count * int(np.sum(~fits))
    return Layout(starts, sources[nonempty], np.zeros(int(nonempty.sum()), bool), np.arange(len(documents)), skipped)


def too_long(name: str, skip: bool, lengths: Ids, seq_len: int) -> NDArray[np.bool_]:
    """Return True for records that fit into a row; without `skip`, raise UserError if there are others."""
    fits = lengths <= seq_len
    if not (skip or fits.all()):
        limit = f"the longest has {lengths.max():,}; increase train.seq_len, or set data.bad_records=skip to skip them"
        problem = f"{np.sum(~fits):,} of {len(fits):,} {RECORDS[name]} are longer than rows of {seq_len:,} tokens"
        raise UserError("data.pairs" if name == "pairs" else "data.records", f"{problem}, {limit}")
    return fits


def texts(name: str, skip: bool, corpus: Corpus, order: Ids, seq_len: int) -> Layout:
    """Fit whole documents into rows; longer ones are skipped with `skip`, otherwise they raise UserError."""
    fits = too_long(name, skip, corpus.lengths(order), seq_len)
    return fit(corpus, order[fits], seq_len)._replace(cut_documents=int(np.sum(~fits)))


# Records that stay whole: the documents of one, and their name. With "short ", longer ones than a row are left out.
TOGETHER = {"pairs": 2, "classes": 1, "passages": 2, "triplets": 3, "answers": 1}
RECORDS = {"pairs": "pairs", "classes": "texts", "passages": "pairs", "triplets": "triplets", "answers": "answers"}
LAYOUTS: dict[str, Callable[[Corpus, Ids, int], Layout]] = {
    "cut": cut,
    "fit": fit,
    **{name: partial(groups, name, False) for name in TOGETHER},
    **{f"short {name}": partial(groups, name, True) for name in TOGETHER},
    "classes": partial(texts, "classes", False),
    "short classes": partial(texts, "classes", True),
}


def cut_pieces(corpus: Corpus, order: Ids, seq_len: int) -> tuple[Ids, Ids, Ids]:
    """Cut documents into pieces of at most a row; return starts, lengths, and the document's length from there on.

    Pieces without a label, such as a lone end-of-document token, are left out.
    """
    lengths = corpus.lengths(order)
    counts = -(-lengths // seq_len)
    first = np.cumsum(counts) - counts
    document = np.repeat(np.arange(len(order)), counts)
    start = (np.arange(len(document)) - first[document]) * seq_len
    remaining = lengths[document] - start
    has_label = remaining > 1
    if corpus.counted is not None:
        has_label = rows_with_label(corpus, order, first * seq_len, len(document), seq_len)
    sources = corpus.offsets[order[document]] + start
    return sources[has_label], np.minimum(remaining, seq_len)[has_label], remaining[has_label]


def rows_with_label(corpus: Corpus, order: Ids, first: Ids, rows: int, seq_len: int) -> NDArray[np.bool_]:
    """Return bool[rows], True for rows with a label, for a corpus in which some tokens are not labels.

    Document `order[i]` begins at position `first[i]` of the stream.
    """
    assert corpus.counted is not None
    starts = np.full(len(corpus), -1)
    starts[order] = first
    has_label = np.zeros(rows, bool)
    for begin in range(0, len(corpus.counted), TOKENS_AT_ONCE):
        at = begin + np.flatnonzero(corpus.counted[begin : begin + TOKENS_AT_ONCE])
        document = np.searchsorted(corpus.offsets, at, side="right") - 1
        offset = at - corpus.offsets[document]
        is_label = (starts[document] >= 0) & (offset > 0)
        has_label[(starts[document] + offset - 1)[is_label] // seq_len] = True
    return has_label


# ---- best fit ------------------------------------------------------------------------------------------


class Space:
    """Sequences with room left, in stacks of equal room."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # the keys of `stacks`, ascending
        self.stacks: dict[int, list[Ids]] = {}

    def add(self, size: int, rows: Ids) -> None:
        """Add sequences with room for `size` tokens each."""
        if size and len(rows):
            if size not in self.stacks:
                insort(self.sizes, size)
            self.stacks.setdefault(size, []).append(rows)

    def take(self, size: int) -> tuple[int, Ids] | None:
        """Remove a stack with the least room of at least `size`; return (room, sequences), or None if there is none."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return None
        room = self.sizes[at]
        rows = self.stacks[room].pop()
        if not self.stacks[room]:
            del self.stacks[room], self.sizes[at]
        return room, rows


def best_fit(sizes: Ids, room: int) -> Ids:
    """Return, for each piece of `sizes` tokens (at most `room`), the piece that opened its sequence.

    From the longest on, each piece goes into the sequence with the least sufficient room, or opens one
    (arXiv:2404.10830). Pieces of one size are placed together: a piece leaves less room than all other sequences have,
    so the next pieces of this size fill the same sequence until it is too small. That takes O(n log n) for n pieces, of
    which in Python O(m log room) for m sizes.
    """
    openers, space = np.empty_like(sizes), Space()
    for size, pieces in group_by_size(sizes):
        while len(pieces):
            room_left, rows = space.take(size) or (room, pieces[:: room // size])
            per_row = room_left // size
            placed = pieces[: per_row * len(rows)]
            full_rows, last_count = divmod(len(placed), per_row)
            openers[placed] = np.repeat(rows[: full_rows + 1], per_row)[: len(placed)]
            space.add(room_left - per_row * size, rows[:full_rows])
            space.add(room_left - last_count * size, rows[full_rows : full_rows + 1])  # partly filled
            space.add(room_left, rows[full_rows + 1 :])
            pieces = pieces[len(placed) :]
    return openers


def group_by_size(sizes: Ids) -> Iterator[tuple[int, Ids]]:
    """Yield each size, from the largest on, with the pieces of that size."""
    order = np.argsort(-sizes, kind="stable")
    for pieces in filter(len, np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1)):
        yield int(sizes[pieces[0]]), pieces


# ---- stored layouts ------------------------------------------------------------------------------------


FORMAT = 1  # version of the stored files and of their keys
DTYPES = {"starts": np.int64, "sources": np.int64, "continues": np.bool_, "rows": np.int64}
IN_MEMORY = 2**22  # sequences; shorter orders are faster to make than to store


class LayoutSpec(NamedTuple):
    """The parameters of a layout, apart from the documents.

    `seed` decides the order; `documents_before` is the number of documents in earlier volumes.
    """

    seed: list[int]
    documents_before: int
    eval_fraction: float
    seq_len: int
    packing: str
    images: int = 0
    image_tokens: int = 0


class VolumeRows(NamedTuple):
    """The training and validation sequences, each None without documents.

    With `is_cut`, the validation sequences are the end of one document.
    """

    train: PackedRows | None
    held_out: PackedRows | None
    is_cut: bool


def layout_rows(corpus: Corpus, spec: LayoutSpec, cache: Cache) -> VolumeRows:
    """Return the sequences of a volume, from the cache if they are there."""
    key = [FORMAT, "rows", corpus.fingerprint, corpus.end_of_document, spec]
    volume = get_or_make(cache, key, lambda folder: write_layouts(folder, corpus, spec))
    if corpus.values is None:
        corpus = replace(corpus, offsets=corpus.offsets[:0].copy())  # the layout replaces them, so unmap them
    train, held_out = (load_rows(volume, half, corpus, spec.seq_len) for half in ("train", "held_out"))
    return VolumeRows(train, held_out, volume.holds["is_cut"])


def write_layouts(folder: Path, corpus: Corpus, spec: LayoutSpec) -> dict[str, Any]:
    """Write both layouts of a volume, and return the facts to store."""
    count = TOGETHER.get(spec.packing.removeprefix("short "))
    halves = partial(split_records, count) if count else split
    split_corpus, trained, held_out = halves(corpus, spec.eval_fraction, spec.documents_before)
    np.random.default_rng(spec.seed).shuffle(trained)
    holds = {
        half: write_layout(folder, half, split_corpus, order, spec) for half, order in named_halves(trained, held_out)
    }
    return {**holds, "is_cut": len(split_corpus) > len(corpus)}


def named_halves(trained: Ids, held_out: Ids) -> list[tuple[str, Ids]]:
    """Return (name, documents) of the halves that have documents."""
    return [(half, order) for half, order in (("train", trained), ("held_out", held_out)) if len(order)]


def write_layout(folder: Path, half: str, corpus: Corpus, order: Ids, spec: LayoutSpec) -> Facts:
    """Write one layout, and return its facts."""
    rows = pack(corpus, order, spec.seq_len, spec.packing, spec.images, spec.image_tokens)
    for name in DTYPES:
        getattr(rows.layout, name).tofile(folder / f"{half}.{name}.bin")
    return rows.facts


def load_rows(volume: StoredFolder, half: str, corpus: Corpus, seq_len: int) -> PackedRows | None:
    """Return the sequences of a stored layout, or None if it has no such half."""
    if half not in volume.holds:
        return None
    facts = Facts(*volume.holds[half])
    arrays = {name: volume.array(f"{half}.{name}", dtype) for name, dtype in DTYPES.items()}
    return PackedRows(corpus, Layout(**arrays, cut_documents=facts.cut_documents), seq_len, facts)


def permutation(count: int, seed: list[int], cache: Cache | None) -> Ids:
    """Return a permutation of the numbers below `count` drawn from `seed`; long ones are stored in the cache."""
    if cache is None or count <= IN_MEMORY:
        return np.random.default_rng(seed).permutation(np.arange(count))
    dtype = np.dtype(np.uint32 if count < 2**32 else np.int64)

    def make(folder: Path) -> None:
        order = np.arange(count, dtype=dtype)
        np.random.default_rng(seed).shuffle(order)
        order.tofile(folder / "order.bin")

    return get_or_make(cache, [FORMAT, "order", count, seed], make).array("order", dtype)


# ---- preference pairs ----------------------------------------------------------------------------------


def split_records(
    size: int, corpus: Corpus, eval_fraction: float, documents_before: int = 0
) -> tuple[Corpus, Ids, Ids]:
    """Return the corpus and the documents of training and of validation records, each ascending, like `corpus.split`.

    All `size` documents of a record are in the same half, whole. If the draw selects no record, the last one is for
    validation.
    """
    is_validation_record = np.full(len(corpus) // size, eval_fraction == 1)
    if 0 < eval_fraction < 1:
        is_validation_record = draw_validation(len(is_validation_record), eval_fraction, documents_before // size)
        if len(is_validation_record) < 2:
            check_records(documents_before)
            is_validation_record[:] = False
        elif is_validation_record.all() or not is_validation_record.any():
            is_validation_record = np.arange(len(is_validation_record)) == len(is_validation_record) - 1
    is_validation = np.repeat(is_validation_record, size)
    return corpus, np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


class PairRows(OfRows):
    """Rows of one pair, triplet or answer each. An entry `pairs`, int64 [rows], is 1, or 0 for rows that fill a batch.

    `records` is the kind. If pairs have margins, these are the entry `margins`, fp32 [rows]; an answer's is
    `desirable`. A query's passages have the entries `PASSAGES`, int64 [rows], digests of their tokens.
    `reference`, fp32 [all rows, 2 or 3], are the reference model's log-probabilities of a row's answers. They become
    the entries `REFERENCE`, or `ANSWER_REFERENCE`, fp32 [rows]. With one more column than a record has documents, an
    unrelated answer is the last document of each row.
    """

    reference: NDArray[np.float32] | None = None

    def __init__(self, rows: Rows, records: str):
        super().__init__(rows)
        self.records, self.documents = RECORDS[records], TOGETHER[records]
        self.names = ANSWER_REFERENCE if self.documents == 1 else REFERENCE
        self.passages = PASSAGES.get(records, ())

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        entries: dict[str, NDArray[Any]] = {**self.rows.batch(rows), "pairs": np.ones(len(rows), np.int64)}
        if "values" in entries:
            entries["desirable" if self.documents == 1 else "margins"] = entries.pop("values")[:, 0]
        for document, name in enumerate(self.passages, 1):
            entries[name] = digests(entries["tokens"], entries["documents"] == document)
        if self.reference is None:
            return entries
        if self.reference.shape[1] > self.documents:
            others = self.rows.batch((rows - 1) % len(self))
            for i in range(len(rows)):
                row, other = ({name: entry[i] for name, entry in part.items()} for part in (entries, others))
                append_unrelated(row, other, self.documents)
        return entries | {name: column for name, column in zip(self.names, self.reference[rows].T)}


def digests(tokens: Ids, is_taken: NDArray[np.bool_]) -> Ids:
    """Return a number for each row, int64 [rows], that is the same for rows whose taken tokens are equal."""
    hashes = (blake2b(row[taken].tobytes(), digest_size=8) for row, taken in zip(tokens, is_taken))
    return np.array([int.from_bytes(value.digest(), "little", signed=True) for value in hashes])


def append_unrelated(row: dict[str, Ids], other: dict[str, Ids], number: int) -> None:
    """Write document `number` into the padding of a row: its prompt with the first answer of another row.

    It is cut if there is too little padding.
    """
    first, other_first = (np.flatnonzero(part["labels"] != IGNORED_LABEL)[0] for part in (row, other))
    answer, begin = slice(other_first, int(np.sum(other["documents"] == 0))), int(np.sum(row["documents"] >= 0))
    tokens = np.concatenate((row["tokens"][: first + 1], other["tokens"][answer][1:]))
    labels = np.concatenate((row["labels"][:first], other["labels"][answer]))
    size = min(len(tokens), len(row["tokens"]) - begin)
    document = {"tokens": tokens, "labels": labels, "positions": np.arange(size), "documents": np.full(size, number)}
    for name, values in document.items():
        row[name][begin : begin + size] = values[:size]


def of_records(rows: Rows, cfg: DataConfig) -> Rows:
    """Return packed rows with the entries of the records of a config: pairs and the like, or classes."""
    if cfg.has_groups:
        return PairRows(rows, "pairs" if cfg.pairs else cfg.records)
    return ClassRows(rows) if cfg.records == "classes" else rows


# ---- classes -------------------------------------------------------------------------------------------


class ClassRows(OfRows):
    """Rows of texts whose last token has the number of the text's class as its label."""

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        entries = self.rows.batch(rows)
        classes = entries.pop("values").astype(np.int64)
        return entries | {"labels": np.where(entries["labels"] == IGNORED_LABEL, IGNORED_LABEL, classes)}
