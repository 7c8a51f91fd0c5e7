"""Preference pairs: rows of two documents, the chosen and the rejected answer, each with its prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Corpus, Ids, drawn
from compiler_trainer.data.packing import EVERY, Chosen, Rows

PAIRED = ("pairs", "short pairs")  # packings of pairs
REFERENCE = ("reference_chosen", "reference_rejected")


def split_pairs(corpus: Corpus, eval_fraction: float, before: int = 0) -> tuple[Corpus, Ids, Ids]:
    """Return the corpus and the documents of training and of validation pairs, each ascending, like `corpus.split`.

    Both documents of a pair are in the same half. If the draw selects no pair, the last one is for validation.
    """
    is_held_out = np.full(len(corpus) // 2, eval_fraction == 1)
    if 0 < eval_fraction < 1:
        is_held_out = drawn(len(is_held_out), eval_fraction, before // 2)
        if len(is_held_out) < 2:
            raise UserError("data.eval_fraction", "there is one pair, none of which can be held out; set it to 0")
        if is_held_out.all() or not is_held_out.any():
            is_held_out = np.arange(len(is_held_out)) == len(is_held_out) - 1
    of_documents = np.repeat(is_held_out, 2)
    return corpus, np.flatnonzero(~of_documents), np.flatnonzero(of_documents)


class PairRows(Rows):
    """Rows of one pair each. An entry `pairs`, int64 [rows], is 1, or 0 if a row only fills a batch.

    `reference`, fp32 [all rows, 2], are the reference model's log-probabilities of both answers. They become the
    entries `reference_chosen` and `reference_rejected`, fp32 [rows].
    """

    def __init__(self, rows: Rows, reference: NDArray[np.float32] | None = None):
        self.rows, self.reference = rows, reference
        self.seq_len, self.facts = rows.seq_len, rows.facts

    def __len__(self) -> int:
        return len(self.rows)

    def filled(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        return self.rows.filled(rows)

    def batch(self, rows: Ids, read: Chosen = EVERY) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        found: dict[str, NDArray[Any]] = {**self.rows.batch(rows, read), "pairs": np.ones(len(rows), np.int64)}
        if self.reference is not None:
            found |= {name: self.reference[rows, i] for i, name in enumerate(REFERENCE)}
        return found
