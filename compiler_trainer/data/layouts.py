"""Lay out documents in sequences of equal length: end to end and cut, or fitted in uncut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.best_fit import best_fit
from compiler_trainer.data.corpus import Corpus, Ids

PADDING = -1
TOKENS_AT_ONCE = 2**22


class Layout(NamedTuple):
    """Pieces of a corpus laid end to end in a stream; each `seq_len` tokens of it are a row (a training sequence).

    Piece i has the corpus tokens from `sources[i]` on, or padding if that is PADDING; it fills the stream from
    `starts[i]` to `starts[i + 1]`.
    """

    starts: Ids  # [pieces + 1]
    sources: Ids  # [pieces]
    continues: NDArray[np.bool_]  # True if a piece's document continues in a row that is not the next
    rows: Ids  # the rows that have a label
    cut_documents: int  # number of documents whose labels are in several rows


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


def pairs(skip: bool, corpus: Corpus, order: Ids, seq_len: int) -> Layout:
    """Lay out one pair of documents per row: a chosen answer with an even number, and the next, its rejected answer.

    Pairs longer than a row are skipped with `skip`; otherwise they raise UserError.
    """
    firsts = order[order % 2 == 0]
    lengths = np.stack((corpus.lengths(firsts), corpus.lengths(firsts + 1)), 1)
    fits = (size := lengths.sum(1)) <= seq_len
    if not (skip or fits.all()):
        limit = f"the longest has {size.max():,}; increase train.seq_len, or set data.bad_records=skip to skip them"
        problem = f"{np.sum(~fits):,} of {len(firsts):,} pairs are longer than rows of {seq_len:,} tokens"
        raise UserError("data.pairs", f"{problem}, {limit}")
    firsts, lengths = firsts[fits], lengths[fits]
    sources = np.stack((corpus.offsets[firsts], corpus.offsets[firsts + 1], np.full(len(firsts), PADDING)), 1).ravel()
    sizes = np.concatenate((lengths, seq_len - lengths.sum(1, keepdims=True)), 1).ravel()
    nonempty = sizes > 0
    starts = np.concatenate(([0], np.cumsum(sizes[nonempty])))
    skipped = 2 * int(np.sum(~fits))
    return Layout(starts, sources[nonempty], np.zeros(int(nonempty.sum()), bool), np.arange(len(firsts)), skipped)


LAYOUTS: dict[str, Callable[[Corpus, Ids, int], Layout]] = {
    "cut": cut,
    "fit": fit,
    "pairs": partial(pairs, False),
    "short pairs": partial(pairs, True),
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
