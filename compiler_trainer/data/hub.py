"""Datasets as the `datasets` library loads them: of a local folder, or cached under a name."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.records import Columns, columns_of

ROWS_AT_ONCE = 1000


@functools.cache
def library() -> Any:
    """The `datasets` library; raises UserError where it is missing."""
    try:
        return import_module("datasets")
    except ImportError as error:
        raise UserError("data", f"hf_dataset needs datasets ({error}); pip install 'compiler-trainer[hf]'") from error


@functools.cache
def loaded(name: str) -> Any:
    """The split that a name stands for: JSON of path, name of a configuration, and split."""
    path, configuration, split = json.loads(name)
    try:
        return library().load_dataset(path, configuration, split=split)
    except Exception as error:  # the library raises whatever its readers raise
        raise UserError("data.path", f"{path} cannot be loaded: {' '.join(str(error).split())}") from error


def rows(name: str, start: int, end: int, wanted: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows from `start` to before `end`, numbered; raises UserError where a column is missing."""
    dataset = loaded(name)
    columns = columns_of(dataset.column_names, wanted)
    if missing := set(columns) - set(dataset.column_names):
        raise UserError("data.path", f'has no column "{min(missing)}"; there are {", ".join(dataset.column_names)}')
    dataset = dataset.select_columns(columns)
    for first in range(start, end, ROWS_AT_ONCE):
        part = dataset[first : min(first + ROWS_AT_ONCE, end)]
        yield from enumerate((dict(zip(columns, row)) for row in zip(*(part[name] for name in columns))), first)
