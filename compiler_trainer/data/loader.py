"""Global batches in a reproducible order, each row exactly once an epoch of its source whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Ids
from compiler_trainer.data.laid import shuffled
from compiler_trainer.data.mixture import Mixture
from compiler_trainer.data.packing import EVERY, Chosen
from compiler_trainer.places.cache import Cache

Batch = dict[str, Tensor]
MOST_TAKEN = 2**62  # rows of a source, with room to count on


class LoaderState(TypedDict):
    """Where a loader stands: how many rows of each source are done."""

    taken: list[int]
    seed: int | None
    fingerprint: str


class Made(NamedTuple):
    """A batch, how many of its tokens are of documents, and how many rows of each source are done with it."""

    batch: Batch
    filled: int
    taken: tuple[int, ...]


class Loader:
    """Endless batches of `batch_size` rows, in a new permutation each epoch, or in file order where `seed` is None.

    A source that reaches the end of an epoch goes on with the first rows of the next. A thread makes the batch to come
    while one is used. Long permutations are kept in `cache`, one copy a machine.
    """

    def __init__(self, rows: Mixture, batch_size: int, seed: int | None, cache: Cache | None = None):
        self.rows, self.batch_size, self.seed, self.cache = rows, batch_size, seed, cache
        self.read: Chosen = EVERY
        self.thread = ThreadPoolExecutor(1, "next-batch")
        self.ahead: tuple[tuple[int, ...], Future[Made]] | None = None  # made for so many rows taken
        self.orders = lru_cache(2 * len(rows.parts))(self._order)
        self.reset()

    def reset(self) -> None:
        """Go back to the first row of every source."""
        self.taken = (0,) * len(self.rows.parts)
        self.filled = 0  # tokens of the last batch that are of documents

    def read_only(self, rows: Ids) -> None:
        """From the next batch on, read tokens of these of its rows alone; of the others make what `Rows.batch` says."""
        self.read = np.zeros(self.batch_size, bool)
        self.read[rows] = True
        self.ahead = None

    def next(self) -> Batch:
        """The next global batch, int64 [batch_size, seq_len]."""
        taken, made = self.ahead or (None, None)
        batch, self.filled, self.taken = made.result() if made and taken == self.taken else self._make(self.taken)
        self.ahead = self.taken, self.thread.submit(self._make, self.taken)
        return batch

    def state_dict(self) -> LoaderState:
        """What `load_state_dict` needs to go on from here."""
        return {"taken": list(self.taken), "seed": self.seed, "fingerprint": self.rows.fingerprint}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on where `state` was taken, at any batch size; raises UserError where its rows or their order differ.

        A state that is none raises KeyError or ValueError.
        """
        if state["seed"] != self.seed:
            raise UserError("data.seed", f"is {self.seed}, but the saved data state was made with {state['seed']}")
        if state["fingerprint"] != self.rows.fingerprint:
            differ = f"these rows are {self.rows.fingerprint}, those of the saved data state {state['fingerprint']}"
            raise UserError("data", f"{differ}; keep data.*, its files and train.seq_len as they were")
        taken, parts = state["taken"], len(self.rows.parts)
        if not isinstance(taken, list | tuple) or len(taken) != parts:
            raise ValueError(f"taken is not a list of {parts}, a number of rows for each source")
        if not all(type(count) is int and 0 <= count <= MOST_TAKEN for count in taken):
            raise ValueError(f"taken has to be whole numbers of rows, from 0 to {MOST_TAKEN:,}")
        self.taken = tuple(taken)

    def draw(self, taken: tuple[int, ...], size: int) -> tuple[Ids, Ids]:
        """The next rows where so many of each source are taken, and how many of each these are."""
        turns = self.rows.draw(np.array(taken), size)
        counts = np.bincount(turns, minlength=len(taken))
        rows = np.empty(size, np.int64)
        for part, (start, count) in enumerate(zip(taken, counts)):
            rows[turns == part] = self._rows(part, np.arange(start, start + count))
        return rows, counts

    def _make(self, taken: tuple[int, ...]) -> Made:
        rows, counts = self.draw(taken, self.batch_size)
        batch = {name: torch.from_numpy(array) for name, array in self.rows.batch(rows, self.read).items()}
        return Made(batch, int(self.rows.filled(rows).sum()), tuple((np.array(taken) + counts).tolist()))

    def _rows(self, part: int, numbers: Ids) -> Ids:
        """The rows that samples of a part are, by their numbers from the first epoch on."""
        epochs, index = np.divmod(numbers, len(self.rows.parts[part]))
        found = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            found[epochs == epoch] = self.orders(part, int(epoch))[index[epochs == epoch]]
        return found + self.rows.firsts[part]

    def _order(self, part: int, epoch: int) -> Ids:
        """The order of a part's rows in an epoch."""
        count = len(self.rows.parts[part])
        return np.arange(count) if self.seed is None else shuffled(count, [self.seed, part, epoch], self.cache)
