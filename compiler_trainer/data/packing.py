"""Documents laid end to end and cut into rows of equal length, made on demand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.data.corpus import Corpus, Ids, hash_arrays
from compiler_trainer.models import IGNORED_LABEL

TOKENS_AT_ONCE = 2**22


class PackedRows:
    """Rows of `seq_len` tokens over the stream of documents `order`, neighbours sharing no input token.

    Each token of the stream that counts is the label of exactly one position, except the first of each document:
    nothing of its own document stands before it, so the position before it is labelled -100. The last row is filled
    with end-of-document tokens labelled -100. A row without any label is left out.
    """

    def __init__(self, corpus: Corpus, order: Ids, seq_len: int):
        self.corpus, self.seq_len = corpus, seq_len
        lengths = np.diff(corpus.offsets)[order]
        # Document `order[i]` fills the stream from starts[i] on; the last entry is where padding begins.
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self.sources = np.concatenate((corpus.offsets[order], [0]))
        self.fingerprint = hash_arrays(np.array([seq_len]), order, np.frombuffer(corpus.fingerprint.encode(), np.uint8))
        self.labelled = None if corpus.counted is None else self._labelled(corpus.counted, order)

    def __len__(self) -> int:
        # The last token of the stream is a label only: without it, a row that holds nothing else would follow.
        return -(-(self.tokens - 1) // self.seq_len) if self.labelled is None else len(self.labelled)

    @property
    def tokens(self) -> int:
        """Tokens in the stream."""
        return int(self.starts[-1])

    def batch(self, rows: Ids) -> dict[str, Ids]:
        """`tokens`, `labels`, `positions` and `documents`, int64 [len(rows), seq_len], of the rows numbered `rows`.

        Positions count from 0 at each document's first token in the row; documents are numbered from 0 in the row, and
        padding counts as one more document.
        """
        row_starts = (rows if self.labelled is None else self.labelled[rows])[:, None] * self.seq_len
        at = row_starts + np.arange(self.seq_len + 1)
        inside = at < self.tokens
        document = np.searchsorted(self.starts[1:], at, side="right")
        source = at - self.starts[document] + self.sources[document]
        # Padding reads anything, and is replaced.
        stream = self.corpus.tokens.take(source, mode="clip").astype(np.int64)
        stream[~inside] = self.corpus.end_of_document
        is_target = inside[:, 1:] & (document[:, 1:] == document[:, :-1])
        if self.corpus.counted is not None:
            is_target &= self.corpus.counted.take(source[:, 1:], mode="clip")
        return {
            "tokens": stream[:, :-1],
            "labels": np.where(is_target, stream[:, 1:], IGNORED_LABEL),
            "positions": (at - np.maximum(self.starts[document], row_starts))[:, :-1],
            "documents": (document - document[:, :1])[:, :-1],
        }

    def _labelled(self, counted: NDArray[np.bool_], order: Ids) -> Ids:
        """The rows that hold a label, ascending, where some tokens are none."""
        starts = np.full(len(self.corpus), -1)
        starts[order] = self.starts[:-1]
        has_label = np.zeros(-(-self.tokens // self.seq_len), bool)
        for first in range(0, len(counted), TOKENS_AT_ONCE):
            at = first + np.flatnonzero(counted[first : first + TOKENS_AT_ONCE])
            document = np.searchsorted(self.corpus.offsets, at, side="right") - 1
            inner = at - self.corpus.offsets[document]
            is_target = (starts[document] >= 0) & (inner > 0)
            has_label[(starts[document] + inner - 1)[is_target] // self.seq_len] = True
        return np.flatnonzero(has_label)
