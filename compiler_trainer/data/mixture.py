"""Combine rows of several parts: joined, for the volumes of a source, or drawn by weight, for several sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.packing import EVERY, Facts, RowMask, Rows


class JoinedRows(Rows):
    """The rows of `parts`, numbered one part after another."""

    def __init__(self, parts: Sequence[Rows]):
        self.parts = tuple(parts)
        self.firsts = np.cumsum([0, *map(len, self.parts)])  # the first row of each part, then the number of all rows
        self.seq_len = self.parts[0].seq_len
        documents, tokens, cut_documents, row_tokens = (
            sum(counts) for counts in zip(*(part.facts[:4] for part in self.parts))
        )
        self.facts = Facts(
            documents,
            tokens,
            cut_documents,
            row_tokens,
            self.combine_fingerprints([part.fingerprint for part in self.parts]),
        )

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def combine_fingerprints(self, prints: Sequence[str]) -> str:
        """Return the fingerprint of all parts from their fingerprints."""
        return hash_arrays(np.frombuffer("+".join(prints).encode(), np.uint8))

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        counts = np.empty_like(rows)
        for part, mine, numbers in self._by_part(rows):
            counts[mine] = part.token_counts(numbers)
        return counts

    def batch(self, rows: Ids, read_mask: RowMask = EVERY) -> dict[str, NDArray[Any]]:
        """Return the entries of rows of any parts; all parts have the same entries."""
        is_read = np.zeros(len(rows), bool)
        is_read[read_mask] = True
        result: dict[str, NDArray[Any]] = {}
        for part, mine, numbers in self._by_part(rows):
            for name, array in part.batch(numbers, is_read[mine]).items():
                result.setdefault(name, np.empty((len(rows), *array.shape[1:]), array.dtype))[mine] = array
        return result

    def _by_part(self, rows: Ids) -> Iterator[tuple[Rows, NDArray[np.bool_], Ids]]:
        """Yield each part that has some of the rows, bool[rows] of those, and their numbers in it."""
        owners = np.searchsorted(self.firsts, rows, side="right") - 1
        for owner in np.unique(owners):
            mine = owners == owner
            yield self.parts[owner], mine, rows[mine] - self.firsts[owner]


class Mixture(JoinedRows):
    """The rows of `parts`, called `names`, drawn by weights.

    Of the first n rows drawn, for every n, a part gives n times its share of the weights, within one row.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float] = (1.0,), names: Sequence[str] = ()):
        self.weights, self.names = np.array(weights) / sum(weights), tuple(names) or ("",) * len(parts)
        super().__init__(parts)

    def combine_fingerprints(self, prints: Sequence[str]) -> str:
        """Return a single part's own fingerprint; with several parts, it depends on the weights."""
        return prints[0] if len(prints) == 1 else f"{'+'.join(prints)} by {hash_arrays(self.weights)}"

    def draw(self, rows_taken: Ids, count: int) -> NDArray[np.intp]:
        """Return the part of each of the next `count` rows, if `rows_taken` rows were taken of each part before.

        The result does not depend on the seed. Among the parts behind their weight, it chooses the one that would first
        be behind by a full row (Balinski and Young's quota method, doi:10.2307/2318729).
        """
        rows_taken, first = rows_taken.copy(), int(rows_taken.sum()) + 1
        turns = np.empty(count, np.intp)
        for i, number in enumerate(range(first, first + count)):
            behind = rows_taken < number * self.weights
            turns[i] = np.where(behind, (rows_taken + 1) / self.weights, np.inf).argmin()
            rows_taken[turns[i]] += 1
        return turns
