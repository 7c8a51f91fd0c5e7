"""Documents packed into rows (training sequences) of equal length, made on demand."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.data.corpus import Corpus, Ids, hash_arrays
from compiler_trainer.data.layouts import LAYOUTS, PADDING, Layout
from compiler_trainer.models import IGNORED_LABEL
from compiler_trainer.models.loss import PADDING_DOCUMENT


class Facts(NamedTuple):
    """Statistics of packed documents.

    `cut_documents` have labels in several rows; `row_tokens` tokens of all rows belong to documents.
    """

    documents: int
    tokens: int
    cut_documents: int
    row_tokens: int
    fingerprint: str


RowMask = NDArray[np.bool_] | slice
EVERY = slice(None)


class Rows(Protocol):
    """The interface of rows of `seq_len` tokens, made on demand."""

    seq_len: int
    facts: Facts

    def __len__(self) -> int: ...

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""

    def batch(self, rows: Ids, read_mask: RowMask = EVERY) -> dict[str, NDArray[Any]]:
        """Return `tokens`, `labels`, `positions` and `documents` of the rows numbered `rows`.

        All are int64 [len(rows), seq_len]. Positions count from 0 at each document's first token in the row. Documents
        are numbered from 0 in the row; padding has document -1. Rows for which `read_mask`, bool [len(rows)], is False
        have end-of-document tokens, and 0 in place of each label.
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

    def batch(self, rows: Ids, read_mask: RowMask = EVERY) -> dict[str, NDArray[Any]]:
        """Return `tokens`, `labels`, `positions` and `documents` of some rows."""
        layout, row_starts = self.layout, self.layout.rows[rows] * self.seq_len
        piece = self._pieces_of(row_starts)
        at = row_starts[:, None] + np.arange(self.seq_len)
        source = at - layout.starts[piece] + layout.sources[piece]
        is_padding = layout.sources[piece] == PADDING
        has_label = ~is_padding & ((at + 1 < layout.starts[piece + 1]) | layout.continues[piece])
        if self.corpus.counted is not None:
            has_label &= self.corpus.counted.take(source + 1, mode="clip")
        tokens = np.full_like(at, self.corpus.end_of_document)
        tokens[read_mask] = np.where(
            is_padding[read_mask], self.corpus.end_of_document, self._tokens(source[read_mask])
        )
        labels = np.where(has_label, 0, IGNORED_LABEL)
        labels[read_mask] = np.where(has_label[read_mask], self._tokens(source[read_mask] + 1), IGNORED_LABEL)
        return {
            "tokens": tokens,
            "labels": labels,
            "positions": at - np.maximum(layout.starts[piece], row_starts[:, None]),
            "documents": np.where(is_padding, PADDING_DOCUMENT, piece - piece[:, :1]),
        }

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


def pack(corpus: Corpus, order: Ids, seq_len: int, packing: str = "cut") -> PackedRows:
    """Return the rows of the documents `order`, packed as `packing` says, with the layout in memory."""
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
