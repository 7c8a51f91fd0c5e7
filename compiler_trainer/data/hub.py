"""Datasets of the `datasets` library: from a local folder, or cached under a name."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import Fields

ROWS_AT_ONCE = 1000
SAVED = ("state.json", "dataset_dict.json")  # `save_to_disk` writes one of them


@functools.cache
def library() -> Any:
    """Return the `datasets` library; raise UserError if it is missing."""
    try:
        return import_module("datasets")
    except ImportError as error:
        raise UserError("data", f"hf_dataset needs datasets ({error}); pip install 'compiler-trainer[hf]'") from error


@functools.cache
def load_split(name: str) -> Any:
    """Load the split of a name, which is JSON of path, configuration name and split."""
    path, configuration, split = json.loads(name)
    try:
        if any(Path(path, file).is_file() for file in SAVED):
            return select_split(library().load_from_disk(path), split)
        return library().load_dataset(path, configuration, split=split)
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its readers raise
        raise UserError("data.path", f"{path} cannot be loaded: {' '.join(str(error).split())}") from error


def select_split(dataset: Any, split: str) -> Any:
    """Return a split, or a part of one, of a dataset that `save_to_disk` wrote; without splits, any name fits."""
    name, _, part = split.partition("[")
    if isinstance(dataset, dict):
        if name not in dataset:
            raise UserError("data.split", f"is {split}, and the folder has {', '.join(dataset)}; name one of these")
        dataset = dataset[name]
    if not part:
        return dataset
    if "+" in split:
        raise UserError(
            "data.split", f"is {split}; for a folder of save_to_disk give a single part, such as '{name}[:10%]'"
        )
    (absolute,) = library().ReadInstruction.from_spec(split).to_absolute({name: len(dataset)})
    return dataset.select(range(absolute.from_, absolute.to))


def read_rows(name: str, start: int, end: int, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) from `start` to before `end`; raise UserError if a column is missing."""
    dataset = load_split(name)
    columns = fields.used_names(dataset.column_names)
    if absent := set(columns) - set(dataset.column_names):
        raise UserError("data.path", f'has no column "{min(absent)}"; there are {", ".join(dataset.column_names)}')
    dataset = dataset.select_columns(columns)
    for first in range(start, end, ROWS_AT_ONCE):
        part = dataset[first : min(first + ROWS_AT_ONCE, end)]
        yield from enumerate((dict(zip(columns, row)) for row in zip(*(part[name] for name in columns))), first)
