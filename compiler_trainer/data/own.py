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
from compiler_trainer.data.packing import EVERY, Facts, RowMask, Rows
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


class DatasetRows(Rows):
    """The rows `numbers` of a user's dataset."""

    def __init__(self, dataset: Dataset, numbers: Ids, seq_len: int, place: str):
        self.dataset, self.numbers, self.seq_len, self.place = dataset, numbers, seq_len, place
        first = self.row(0)
        if "tokens" in first and first["tokens"].shape != (seq_len,):
            shape = list(first["tokens"].shape)
            raise UserError(place, f"has rows of {shape} tokens, and train.seq_len={seq_len}; make them equal")
        self.shapes = {name: (value.shape, value.dtype) for name, value in first.items()}
        ends = (first, self.row(len(numbers) - 1))
        description = repr((getattr(dataset, "fingerprint", ""), len(dataset), seq_len)).encode()
        arrays = [np.ascontiguousarray(row[name]).view(np.uint8).ravel() for row in ends for name in sorted(row)]
        fingerprint = hash_arrays(np.frombuffer(description, np.uint8), numbers, *arrays)
        row_tokens = len(numbers) * seq_len
        self.facts = Facts(len(numbers), row_tokens, 0, row_tokens, fingerprint)

    def __len__(self) -> int:
        return len(self.numbers)

    def token_counts(self, rows: Ids) -> Ids:
        """Return the number of tokens of each row that belong to documents: all."""
        return np.full_like(rows, self.seq_len)

    def batch(self, rows: Ids, read_mask: RowMask = EVERY) -> dict[str, NDArray[Any]]:
        """Return the entries of some rows, each [len(rows), ...]; all rows are read, as labels may be in any."""
        items = [self.row(int(row)) for row in rows]
        return {name: np.stack([row[name] for row in items]) for name in self.shapes}

    def row(self, at: int) -> dict[str, NDArray[Any]]:
        """Return a row as arrays; raise UserError if it is not a dict, or its entries differ from the first row's."""
        number = int(self.numbers[at])
        item = self.dataset[number]
        if not isinstance(item, Mapping) or not item:
            raise UserError(self.place, f"item {number} is a {type(item).__name__}, not a dict of named tensors")
        row = add_defaults({name: np.asarray(value) for name, value in item.items()})
        shapes = {name: (value.shape, value.dtype) for name, value in row.items()}
        if shapes != getattr(self, "shapes", shapes):
            raise UserError(
                self.place, f"item {number} has {describe_shapes(shapes)}, the first {describe_shapes(self.shapes)}"
            )
        return row


def add_defaults(row: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a row with the default entries for its tokens added."""
    if "tokens" not in row:
        return row
    tokens = row["tokens"].astype(np.int64)
    defaults = {
        "labels": np.append(tokens[1:], IGNORED_LABEL),
        "positions": np.arange(len(tokens)),
        "documents": np.zeros_like(tokens),
    }
    return {**defaults, **row, "tokens": tokens}


def describe_shapes(shapes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return entries with their shapes and dtypes, as text."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in shapes.items())


def load_dataset(source: SourceConfig) -> Dataset:
    """Create the dataset that a source names; raise UserError if it is not a dataset."""
    target = {"_target_": source._target_, **source.arguments}
    dataset = called(target, "data")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        fix = "it needs __len__ and __getitem__; write a stream into files, or make it indexable"
        raise UserError("data._target_", f"{name_of(target)} makes a {type(dataset).__name__}; {fix}")
    if not len(dataset):
        raise UserError("data._target_", f"{name_of(target)} has no rows")
    return dataset


def split_numbers(count: int, fraction: float, seed: list[int]) -> tuple[Ids, Ids]:
    """Return the training and validation row numbers; a fraction above 0 gives at least one validation row."""
    order = np.random.default_rng(seed).permutation(count)
    size = count if fraction == 1 else min(max(1, round(fraction * count)), count - 1) if fraction else 0
    return np.sort(order[size:]), np.sort(order[:size])
