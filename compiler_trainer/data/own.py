"""A dataset of one's own as rows: whatever has a length and gives an item by its number, a row each."""

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
    """Rows by number, each time the same; as `torch.utils.data.Dataset` has it.

    A row has entries by name, tensors or arrays, of the same shapes in all rows. With `tokens`, int64 [train.seq_len],
    those of `labels`, `positions` and `documents` that are left out are of one document that fills the row; tokens of
    document -1 are padding. With
    `vocab_size` the model is checked; `fingerprint`, a text, changes where rows do.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...


class OwnRows(Rows):
    """Those rows of a dataset that `numbers` has."""

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
        """How many tokens of each row are of documents: all."""
        return np.full_like(rows, self.seq_len)

    def batch(self, rows: Ids, read: Chosen = EVERY) -> dict[str, NDArray[Any]]:
        """The entries of some rows, each [len(rows), ...]; all are read, for labels may be anywhere."""
        made = [self.row(int(row)) for row in rows]
        return {name: np.stack([each[name] for each in made]) for name in self.shapes}

    def row(self, at: int) -> dict[str, NDArray[Any]]:
        """A row as arrays; raises UserError where it is none, or of other entries than the first."""
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
    """A row, with what is usual beside its tokens."""
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
    """Entries with their shapes and dtypes."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in shapes.items())


def dataset_of(source: SourceConfig) -> Dataset:
    """The dataset that a source names; raises UserError where it is none."""
    own = {"_target_": source._target_, **source.arguments}
    found = called(own, "data")
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        fix = "it needs __len__ and __getitem__; write a stream into files, or index it"
        raise UserError("data._target_", f"{name_of(own)} makes a {type(found).__name__}; {fix}")
    if not len(found):
        raise UserError("data._target_", f"{name_of(own)} has no rows")
    return found


def halves(count: int, fraction: float, seed: list[int]) -> tuple[Ids, Ids]:
    """The numbers of rows to train on and of those held out, at least one if a fraction is."""
    order = np.random.default_rng(seed).permutation(count)
    size = count if fraction == 1 else min(max(1, round(fraction * count)), count - 1) if fraction else 0
    return np.sort(order[size:]), np.sort(order[:size])
