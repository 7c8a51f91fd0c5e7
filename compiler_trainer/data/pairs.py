"""Preference pairs: rows of two documents, the chosen and the rejected answer, each with its prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Corpus, Ids, draw_validation
from compiler_trainer.data.packing import EVERY, RowMask, Rows

PAIRED = ("pairs", "short pairs")  # packings of pairs
REFERENCE = ("reference_chosen", "reference_rejected")


def split_pairs(corpus: Corpus, eval_fraction: float, documents_before: int = 0) -> tuple[Corpus, Ids, Ids]:
    """Return the corpus and the documents of training and of validation pairs, each ascending, like `corpus.split`.

    Both documents of a pair are in the same half. If the draw selects no pair, the last one is for validation.
    """
    is_validation_pair = np.full(len(corpus) // 2, eval_fraction == 1)
    if 0 < eval_fraction < 1:
        is_validation_pair = draw_validation(len(is_validation_pair), eval_fraction, documents_before // 2)
        if len(is_validation_pair) < 2:
            raise UserError("data.eval_fraction", "there is only one pair, too few for validation pairs; set it to 0")
        if is_validation_pair.all() or not is_validation_pair.any():
            is_validation_pair = np.arange(len(is_validation_pair)) == len(is_validation_pair) - 1
    is_validation = np.repeat(is_validation_pair, 2)
    return corpus, np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


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

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        return self.rows.token_counts(rows)

    def batch(self, rows: Ids, read_mask: RowMask = EVERY) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        entries: dict[str, NDArray[Any]] = {**self.rows.batch(rows, read_mask), "pairs": np.ones(len(rows), np.int64)}
        if self.reference is not None:
            entries |= {name: self.reference[rows, i] for i, name in enumerate(REFERENCE)}
        return entries
