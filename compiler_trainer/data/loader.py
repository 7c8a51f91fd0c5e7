"""Global batches in a reproducible order, each row once per epoch of its source on any number of ranks.

The rows of several parts are combined: joined, for the volumes of a source, or drawn by weight, for several sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.packing import Facts, Rows, permutation
from compiler_trainer.places.cache import Cache

Batch = dict[str, Tensor]
MOST_TAKEN = 2**62  # rows of a source, far below the limit of int64


class LoaderState(TypedDict):
    """The position of a loader: the number of rows taken of each source."""

    taken: list[int]
    seed: int | None
    fingerprint: str
    windows: NotRequired[list[list[Any]]]  # of streams: the window of each source's next row


class NextBatch(NamedTuple):
    """A batch, the number of its tokens that belong to documents, and the rows then taken of each source."""

    batch: Batch
    token_count: int
    taken: tuple[int, ...]


class Loader:
    """Endless batches of `batch_size` rows, in a new permutation each epoch, or in file order if `seed` is None.

    A source that reaches the end of an epoch continues with the first rows of the next. A thread prepares the next
    batch while the current one is used. Long permutations are stored in `cache`, once per machine. `numbers` are
    metrics of the last batch.
    """

    numbers: Mapping[str, float] = {}

    def __init__(self, rows: Mixture, batch_size: int, seed: int | None, cache: Cache | None = None):
        self.rows, self.batch_size, self.seed, self.cache = rows, batch_size, seed, cache
        self.own = np.arange(batch_size)  # the rows of a batch that are made
        self.thread = ThreadPoolExecutor(1, "next-batch")
        self.next_batch: tuple[tuple[int, ...], Future[NextBatch]] | None = (
            None  # the rows taken before it, and the next batch
        )
        self.orders = lru_cache(2 * len(rows.parts))(self._order)
        self.reset()

    def reset(self) -> None:
        """Go back to the first row of every source."""
        self.rows_taken = (0,) * len(self.rows.parts)
        self.token_count = 0  # tokens of the last batch that belong to documents

    def read_only(self, rows: Ids) -> None:
        """From the next batch on, make only these rows; the others are zeros, which take no memory unless touched."""
        self.own = rows if len(rows) else np.zeros(1, np.int64)  # a batch without any row would have no entries
        self.next_batch = None

    def next(self) -> Batch:
        """Return the next global batch, int64 [batch_size, seq_len]."""
        taken, future = self.next_batch or (None, None)
        batch, self.token_count, self.rows_taken = (
            future.result() if future and taken == self.rows_taken else self._make(self.rows_taken)
        )
        self.next_batch = self.rows_taken, self.thread.submit(self._make, self.rows_taken)
        return batch

    def state_dict(self) -> LoaderState:
        """Return the state from which `load_state_dict` continues."""
        return {"taken": list(self.rows_taken), "seed": self.seed, "fingerprint": self.rows.fingerprint}

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from `state`, at any batch size; raise UserError if it belongs to other rows or another order.

        Raises KeyError or ValueError if `state` is malformed.
        """
        if state["seed"] != self.seed:
            raise UserError("data.seed", f"is {self.seed}, but the saved data state was made with {state['seed']}")
        if state["fingerprint"] != self.rows.fingerprint:
            problem = f"these rows are {self.rows.fingerprint}, those of the saved data state {state['fingerprint']}"
            raise UserError("data", f"{problem}; keep data.*, its files and train.seq_len as they were")
        taken, parts = state["taken"], len(self.rows.parts)
        if not isinstance(taken, list | tuple) or len(taken) != parts:
            raise ValueError(f"taken is not a list of {parts}, a number of rows for each source")
        if not all(type(count) is int and 0 <= count <= MOST_TAKEN for count in taken):
            raise ValueError(f"taken must be integer numbers of rows, from 0 to {MOST_TAKEN:,}")
        self.rows_taken = tuple(taken)

    def draw(self, rows_taken: tuple[int, ...], size: int) -> tuple[Ids, Ids]:
        """Return the next rows after `rows_taken` rows of each source, and the number of rows from each."""
        turns = self.rows.draw(np.array(rows_taken), size)
        counts = np.bincount(turns, minlength=len(rows_taken))
        rows = np.empty(size, np.int64)
        for part, (start, count) in enumerate(zip(rows_taken, counts)):
            rows[turns == part] = self._rows(part, np.arange(start, start + count))
        return rows, counts

    def _make(self, rows_taken: tuple[int, ...]) -> NextBatch:
        rows, counts = self.draw(rows_taken, self.batch_size)
        return NextBatch(
            self.batch(rows), int(self.rows.token_counts(rows).sum()), tuple((np.array(rows_taken) + counts).tolist())
        )

    def batch(self, rows: Ids) -> Batch:
        """Return the global batch of these rows, as many as its size, of which `read_only` says which are made."""
        result: Batch = {}
        for name, array in self.rows.batch(rows[self.own]).items():
            whole = np.zeros((len(rows), *array.shape[1:]), array.dtype)
            whole[self.own] = array
            result[name] = torch.from_numpy(whole)
        return result

    def _rows(self, part: int, numbers: Ids) -> Ids:
        """Return the rows of a part for sample numbers that count across epochs."""
        epochs, index = np.divmod(numbers, len(self.rows.parts[part]))
        rows = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            rows[epochs == epoch] = self.orders(part, int(epoch))[index[epochs == epoch]]
        return rows + self.rows.firsts[part]

    def _order(self, part: int, epoch: int) -> Ids:
        """Return the order of a part's rows in an epoch."""
        count = len(self.rows.parts[part])
        return np.arange(count) if self.seed is None else permutation(count, [self.seed, part, epoch], self.cache)


# ---- parts together ------------------------------------------------------------------------------------


class RowsOfParts(Rows):
    """Rows of which each is in one of several parts; all parts have the same entries."""

    def by_part(self, rows: Ids) -> Iterator[tuple[Rows, NDArray[np.bool_], Ids]]:
        """Yield each part that has some of the rows, bool[rows] of those, and their numbers in it."""
        raise NotImplementedError

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents."""
        counts = np.empty_like(rows)
        for part, mine, numbers in self.by_part(rows):
            counts[mine] = part.token_counts(numbers)
        return counts

    def batch(self, rows: Ids) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows."""
        result: dict[str, NDArray[Any]] = {}
        for part, mine, numbers in self.by_part(rows):
            for name, array in part.batch(numbers).items():
                result.setdefault(name, np.empty((len(rows), *array.shape[1:]), array.dtype))[mine] = array
        return result


class JoinedRows(RowsOfParts):
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

    def by_part(self, rows: Ids) -> Iterator[tuple[Rows, NDArray[np.bool_], Ids]]:
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

    @property
    def padding(self) -> float:
        """The share of the rows drawn that is padding."""
        return float(self.weights @ [part.padding for part in self.parts])

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
