"""Rows of several parts: joined, as those of a source's volumes, or drawn by weights, as those of several sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.packing import EVERY, Chosen, Facts, Rows


class Joined(Rows):
    """The rows of `parts`, numbered one part after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self.parts = tuple(parts)
        self.firsts = np.cumsum([0, *map(len, self.parts)])  # of each part, and the number of all rows
        self.seq_len = self.parts[0].seq_len
        documents, tokens, cut, filled = (sum(counts) for counts in zip(*(part.facts[:4] for part in self.parts)))
        self.facts = Facts(documents, tokens, cut, filled, self.named([part.fingerprint for part in self.parts]))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def named(self, prints: Sequence[str]) -> str:
        """The fingerprint of all parts, by that of each."""
        return hash_arrays(np.frombuffer("+".join(prints).encode(), np.uint8))

    def filled(self, rows: Ids) -> Ids:
        """How many tokens of each row are of documents, of rows of any parts."""
        found = np.empty_like(rows)
        for part, mine, numbers in self._by_part(rows):
            found[mine] = part.filled(numbers)
        return found

    def batch(self, rows: Ids, read: Chosen = EVERY) -> dict[str, NDArray[Any]]:
        """The entries of rows of any parts, which have the same ones."""
        is_read = np.zeros(len(rows), bool)
        is_read[read] = True
        found: dict[str, NDArray[Any]] = {}
        for part, mine, numbers in self._by_part(rows):
            for name, array in part.batch(numbers, is_read[mine]).items():
                found.setdefault(name, np.empty((len(rows), *array.shape[1:]), array.dtype))[mine] = array
        return found

    def _by_part(self, rows: Ids) -> Iterator[tuple[Rows, NDArray[np.bool_], Ids]]:
        """Each part that has some of the rows, which of them, and their numbers in it."""
        owners = np.searchsorted(self.firsts, rows, side="right") - 1
        for owner in np.unique(owners):
            mine = owners == owner
            yield self.parts[owner], mine, rows[mine] - self.firsts[owner]


class Mixture(Joined):
    """The rows of `parts`, which have `names`, drawn by weights.

    Of the first n rows drawn, whatever n is, a part gives n times its share of the weights to within one row.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float] = (1.0,), names: Sequence[str] = ()):
        self.weights, self.names = np.array(weights) / sum(weights), tuple(names) or ("",) * len(parts)
        super().__init__(parts)

    def named(self, prints: Sequence[str]) -> str:
        """The fingerprint of a single part is its own; other weights would draw what is behind them until it is not."""
        return prints[0] if len(prints) == 1 else f"{'+'.join(prints)} by {hash_arrays(self.weights)}"

    def draw(self, taken: Ids, count: int) -> NDArray[np.intp]:
        """Which part gives each of the next `count` rows, where `taken` were taken of each, whatever the seed.

        Of the parts that are behind their weight, the one takes its turn that would first be behind by a whole row
        (Balinski and Young's quota method, doi:10.2307/2318729).
        """
        taken, first = taken.copy(), int(taken.sum()) + 1
        turns = np.empty(count, np.intp)
        for i, number in enumerate(range(first, first + count)):
            behind = taken < number * self.weights
            turns[i] = np.where(behind, (taken + 1) / self.weights, np.inf).argmin()
            taken[turns[i]] += 1
        return turns
