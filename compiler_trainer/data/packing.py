"""Documents packed into rows of equal length, made on demand."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from compiler_trainer.data.corpus import Corpus, Ids, hash_arrays
from compiler_trainer.data.layouts import LAYOUTS, PADDING
from compiler_trainer.models import IGNORED_LABEL


class PackedRows:
    """Rows of `seq_len` tokens of the documents `order`, packed as `packing` says; no token is an input of two.

    Each token that counts is the label of exactly one position, except the first of each document: nothing of its own
    document stands before it, so the position before it is labelled -100. What no document fills holds end-of-document
    tokens labelled -100. A row without any label is left out.
    """

    def __init__(self, corpus: Corpus, order: Ids, seq_len: int, packing: str = "cut"):
        self.corpus, self.seq_len = corpus, seq_len
        self.documents, self.tokens = len(order), int(corpus.lengths(order).sum())
        self.layout = LAYOUTS[packing](corpus, order, seq_len)
        laid = order if packing == "cut" else self.layout.sources
        self.fingerprint = hash_arrays(np.array([seq_len]), laid, np.frombuffer(corpus.fingerprint.encode(), np.uint8))

    def __len__(self) -> int:
        return len(self.layout.rows)

    @cached_property
    def padding(self) -> float:
        """The share of all rows that no document fills."""
        return 1 - float(self.filled(np.arange(len(self))).mean()) / self.seq_len

    @property
    def cut(self) -> float:
        """The share of documents whose labels are in several rows."""
        return self.layout.cut / self.documents

    def filled(self, rows: Ids) -> Ids:
        """How many tokens of each row are of documents."""
        ends = (self.layout.rows[rows] + 1) * self.seq_len
        last = self._pieces(ends - 1)
        return np.where(self.layout.sources[last] == PADDING, self.layout.starts[last], ends) - ends + self.seq_len

    def batch(self, rows: Ids) -> dict[str, Ids]:
        """`tokens`, `labels`, `positions` and `documents`, int64 [len(rows), seq_len], of the rows numbered `rows`.

        Positions count from 0 at each document's first token in the row; documents are numbered from 0 in the row, and
        padding counts as one more document.
        """
        layout = self.layout
        row_starts = layout.rows[rows][:, None] * self.seq_len
        at = row_starts + np.arange(self.seq_len)
        piece = self._pieces(at)
        source = at - layout.starts[piece] + layout.sources[piece]
        is_padding = layout.sources[piece] == PADDING
        has_label = ~is_padding & ((at + 1 < layout.starts[piece + 1]) | layout.continues[piece])
        if self.corpus.counted is not None:
            has_label &= self.corpus.counted.take(source + 1, mode="clip")
        return {
            "tokens": np.where(is_padding, self.corpus.end_of_document, self._tokens(source)),
            "labels": np.where(has_label, self._tokens(source + 1), IGNORED_LABEL),
            "positions": at - np.maximum(layout.starts[piece], row_starts),
            "documents": piece - piece[:, :1],
        }

    def _pieces(self, at: Ids) -> Ids:
        """The pieces that lie at some places of the stream."""
        return np.searchsorted(self.layout.starts, at, side="right") - 1

    def _tokens(self, source: Ids) -> Ids:
        """Tokens of the corpus; beyond its ends anything."""
        return self.corpus.tokens.take(source, mode="clip").astype(np.int64)
