"""Rows of a user's dataset: any object with a length that returns an item, one row, by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import SourceConfig
from compiler_trainer.config.targets import called, name_of
from compiler_trainer.data.corpus import Ids, hash_arrays
from compiler_trainer.data.packing import EVERY, Chosen, Facts, Rows
from compiler_trainer.models import IGNORED_LABEL

Row = Mapping[str, Any]


class Dataset(Protocol):
    """The interface of a user's dataset, as in `torch.utils.data.Dataset`: a row by its number, the same each time.

    A row has named tensors or arrays, of the same shapes in all rows. If it has `tokens`, int64 [train.seq_len],
    missing `labels`, `positions` and `documents` are added as for one document that fills the row; tokens of document
    -1 are padding. If the dataset has `vocab_size`, the model is checked against it; `fingerprint`, a string, has to
    change when rows change.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


class OwnRows(Rows):
    """The rows `numbers` of a user's dataset."""

    def __init__(self, dataset: Dataset, numbers: Ids, seq_len: int, where: str):
        self.dataset, self.numbers, self.seq_len, self.where = dataset, numbers, seq_len, where
        first = self.row(0)
        if "tokens" in first and first["tokens"].shape != (seq_len,):
            shape = list(first["tokens"].shape)
            raise UserError(where, f"has rows of {shape} tokens, and train.seq_len={seq_len}; make either the other")
        self.shapes = {name: (value.shape, value.dtype) for name, value in first.items()}
        ends = (first, self.row(len(numbers) - 1))
        said = repr((getattr(dataset, "fingerprint", ""), len(dataset), seq_len)).encode()
        arrays = [np.ascontiguousarray(row[name]).view(np.uint8).ravel() for row in ends for name in sorted(row)]
        fingerprint = hash_arrays(np.frombuffer(said, np.uint8), numbers, *arrays)
        filled = len(numbers) * seq_len
        self.facts = Facts(len(numbers), filled, 0, filled, fingerprint)

    def __len__(self) -> int:
        return len(self.numbers)

    def filled(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents: all."""
        return np.full_like(rows, self.seq_len)

    def batch(self, rows: Ids, read: Chosen = EVERY) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows, each [len(rows), ...]; all rows are read, as labels may be in any."""
        made = [self.row(int(row)) for row in rows]
        return {name: np.stack([each[name] for each in made]) for name in self.shapes}

    def row(self, at: int) -> dict[str, NDArray[Any]]:
        """Return a row as arrays; raise UserError if it is not a dict, or its entries differ from the first row's."""
        number = int(self.numbers[at])
        found = self.dataset[number]
        if not isinstance(found, Mapping) or not found:
            raise UserError(self.where, f"item {number} is a {type(found).__name__}, no dict of tensors by name")
        row = with_usual({name: np.asarray(value) for name, value in found.items()})
        shapes = {name: (value.shape, value.dtype) for name, value in row.items()}
        if shapes != getattr(self, "shapes", shapes):
            raise UserError(self.where, f"item {number} has {told(shapes)}, the first {told(self.shapes)}")
        return row


def with_usual(row: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a row with the default entries for its tokens added."""
    if "tokens" not in row:
        return row
    tokens = row["tokens"].astype(np.int64)
    usual = {
        "labels": np.append(tokens[1:], IGNORED_LABEL),
        "positions": np.arange(len(tokens)),
        "documents": np.zeros_like(tokens),
    }
    return {**usual, **row, "tokens": tokens}


def told(shapes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return entries with their shapes and dtypes, as text."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in shapes.items())


def dataset_of(source: SourceConfig) -> Dataset:
    """Create the dataset that a source names; raise UserError if it is not a dataset."""
    own = {"_target_": source._target_, **source.arguments}
    found = called(own, "data")
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        fix = "it needs __len__ and __getitem__; write a stream into files, or index it"
        raise UserError("data._target_", f"{name_of(own)} makes a {type(found).__name__}; {fix}")
    if not len(found):
        raise UserError("data._target_", f"{name_of(own)} has no rows")
    return found


def halves(count: int, fraction: float, seed: list[int]) -> tuple[Ids, Ids]:
    """Return the training and validation row numbers; a fraction above 0 gives at least one validation row."""
    order = np.random.default_rng(seed).permutation(count)
    size = count if fraction == 1 else min(max(1, round(fraction * count)), count - 1) if fraction else 0
    return np.sort(order[size:]), np.sort(order[:size])
