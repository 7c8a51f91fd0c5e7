"""Global batches in a reproducible order, each row exactly once an epoch whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Ids
from compiler_trainer.data.packing import PackedRows


class LoaderState(TypedDict):
    """Where a loader stands: `index` rows of `epoch` are done."""

    epoch: int
    index: int
    seed: int | None
    fingerprint: str


class Loader:
    """Endless batches of `batch_size` rows, in a new permutation each epoch, or in file order where `seed` is None.

    A batch that reaches the end of an epoch goes on with the next one's first rows.
    """

    def __init__(self, rows: PackedRows, batch_size: int, seed: int | None):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.reset()

    def reset(self) -> None:
        """Go back to the first row of epoch 0."""
        self._move(epoch=0, index=0)

    def next(self, rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """The next global batch, int64 [batch_size, seq_len], or of it only the `rows` (numbers below `batch_size`)."""
        numbers = self._take(self.batch_size)
        asked = numbers if rows is None else numbers[np.asarray(rows, np.int64)]
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in self.rows.batch(asked).items()}

    def state_dict(self) -> LoaderState:
        """What `load_state_dict` needs to go on from here."""
        return {"epoch": self.epoch, "index": self.index, "seed": self.seed, "fingerprint": self.rows.fingerprint}

    def load_state_dict(self, state: Mapping) -> None:
        """Go on where `state` was taken, at any batch size; raises UserError where its rows or their order differ."""
        if state["seed"] != self.seed:
            raise UserError("data.seed", f"is {self.seed}, but the saved data state was made with {state['seed']}")
        if state["fingerprint"] != self.rows.fingerprint:
            differ = f"these rows are {self.rows.fingerprint}, those of the saved data state {state['fingerprint']}"
            raise UserError("data", f"{differ}; keep data.*, its files and train.seq_len as they were")
        self._move(state["epoch"], state["index"])

    def _take(self, count: int) -> Ids:
        taken = []
        while count:
            if self.index == len(self.order):
                self._move(self.epoch + 1, index=0)
            part = self.order[self.index : self.index + count]
            self.index += len(part)
            count -= len(part)
            taken.append(part)
        return np.concatenate(taken)

    def _move(self, epoch: int, index: int) -> None:
        self.epoch, self.index = epoch, index
        self.order = epoch_order(len(self.rows), self.seed, epoch)


def epoch_order(rows: int, seed: int | None, epoch: int) -> Ids:
    """The rows' order in an epoch."""
    return np.arange(rows) if seed is None else np.random.default_rng([seed, epoch]).permutation(rows)
