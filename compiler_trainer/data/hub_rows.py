"""Datasets of the `datasets` library: loaded as a whole, or as a stream of shards.

Only the library's iteration is used for streams. Its own shuffle buffer is lost when a state is loaded
(github.com/huggingface/datasets/issues/7901).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.extras import library

SAVED = ("state.json", "dataset_dict.json")  # `save_to_disk` writes one of them


datasets = partial(library, "datasets", "data", "hf_dataset ")


@functools.cache
def load_split(name: str) -> Any:
    """Load the split of a name, which is JSON of path, configuration name and split."""
    path, configuration, split = json.loads(name)
    with errors_of(path):
        if is_saved(path):
            return with_files(select_split(datasets().load_from_disk(path), split))
        return with_files(datasets().load_dataset(path, configuration, split=split))


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Raise any error as a UserError: the library raises whatever its readers raise."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError("data.path", f"{path} cannot be loaded: {one_line(error)}") from error


def with_files(dataset: Any) -> Any:
    """Return a dataset whose images are files, {"bytes": ..., "path": ...}, and not pictures."""
    for name, feature in (dataset.features or {}).items():
        if (changed := of_files(feature)) != feature:
            dataset = dataset.cast_column(name, changed)
    return dataset


def of_files(feature: Any) -> Any:
    """Return the type of a column in which images are files."""
    kinds = datasets()
    if isinstance(feature, kinds.Image):
        return kinds.Image(mode=feature.mode, decode=False)
    if isinstance(feature, kinds.List):
        return kinds.List(of_files(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return {name: of_files(part) for name, part in feature.items()}
    return feature


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
    (absolute,) = datasets().ReadInstruction.from_spec(split).to_absolute({name: len(dataset)})
    return dataset.select(range(absolute.from_, absolute.to))


def is_saved(path: str) -> bool:
    """Return True for a folder that `save_to_disk` wrote."""
    return any(Path(path, file).is_file() for file in SAVED)


@functools.cache
def load_stream(name: str) -> Any:
    """Return the split of a name, as for `load_split`, without downloading it; raise UserError."""
    path, configuration, split = json.loads(name)
    if "[" in split or "+" in split:
        raise UserError("data.split", f"is {split}, and a stream has whole splits only; name one, such as train")
    with errors_of(path):
        return with_files(datasets().load_dataset(path, configuration, split=split, streaming=True))


def load_shard(name: str, number: int) -> Any:
    """Return shard `number` of a split, an iterable of rows."""
    stream = load_stream(name)
    return stream.shard(num_shards=stream.num_shards, index=number)
