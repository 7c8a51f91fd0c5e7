"""Log-probabilities of preference pairs under the initial weights (the reference), computed once per run.

RUN/reference.npz keeps them for a resumed run. All ranks compute them, in the precision of training.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.schema import Config
from compiler_trainer.data.datasets import Datasets
from compiler_trainer.data.loader import Batch, Loader, Mixture
from compiler_trainer.data.packing import PairRows
from compiler_trainer.models.loss import INPUTS
from compiler_trainer.models.preference import reference
from compiler_trainer.models.subject import subject
from compiler_trainer.step.ranks import from_rank_0, rank
from compiler_trainer.step.step import Step
from compiler_trainer.training.evaluate import evaluating_step
from compiler_trainer.training.loggers import Working, announce

FILE = "reference.npz"
Values = NDArray[np.float32]  # [pairs, answers of a pair]


def refer(cfg: Config, datasets: Datasets) -> Callable[[], None]:
    """Set the reference log-probabilities of preference pairs if the loss needs them; every rank must call this.

    Return a function that stores new ones in the run folder.
    """
    if not cfg.reference_entries:
        return lambda: None
    parts, path, key = list(datasets.pairs()), Path(cfg.run.dir, FILE), reference_key(cfg)
    values_by_pairs = from_rank_0(partial(read, path, key))
    store: Callable[[], None] = lambda: None  # noqa: E731
    if any(part.fingerprint not in values_by_pairs for part in parts):
        announce("computing the log-probabilities of the reference, the weights that training starts from")
        values_by_pairs |= {part.fingerprint: values for part, values in compute(cfg, datasets)}
        store = partial(write, path, key, values_by_pairs)
    for part in parts:
        part.reference = values_by_pairs[part.fingerprint]
    return store


def reference_key(cfg: Config) -> str:
    """Return a key of everything that log-probabilities depend on, apart from the pairs."""
    return repr((cfg.model, cfg.train.seed, cfg.train.dtype, cfg.passes.cast, cfg.reference_entries))


def read(path: Path, key: str) -> dict[str, Values]:
    """Return the log-probabilities that an earlier start stored, by the fingerprint of pairs.

    They are empty if the file is missing, damaged or of another reference.
    """
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files if name != "of"} if str(stored["of"]) == key else {}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        announce(f"{path} is damaged ({error}); its log-probabilities are computed again")
        return {}


def write(path: Path, key: str, values: dict[str, Values]) -> None:
    """Store log-probabilities; if the disk refuses them, print that a later start computes them again."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            np.savez(file, allow_pickle=False, of=np.array(key), **values)
        os.replace(unfinished, path)
    except OSError as error:
        announce(f"{path} cannot be written: {error.strerror}; a resumed run computes it again")


def compute(cfg: Config, datasets: Datasets) -> Iterator[tuple[PairRows, Values]]:
    """Yield (pairs, log-probabilities), computed by an evaluation program with the initial weights."""
    halves = [loader.rows for loader in (datasets.train, datasets.eval) if loader is not None]
    trained, size = subject(cfg), cfg.train.global_batch_size
    with Working(sys.stderr) if rank() == 0 else nullcontext(lambda task: None) as tell:
        loss = partial(reference, trained.logits, cfg.reference_entries)
        first_rows = entries(Loader(halves[0], size, None), np.arange(size) % len(halves[0]))
        step = evaluating_step(cfg, trained, loss, first_rows, datasets.below, tell)
        for half in halves:
            values = log_probabilities(step, half, size, cfg.reference_entries, tell)
            for part, first in zip(half.parts, half.firsts):
                yield part, values[first : first + len(part)]  # type: ignore[misc]


def log_probabilities(
    step: Step, rows: Mixture, size: int, names: Sequence[str], tell: Callable[[str], None]
) -> Values:
    """Return the log-probabilities of all pairs, computed `size` at a time; a rank reads only its own."""
    values, loader = np.empty((len(rows), len(names)), np.float32), Loader(rows, size, None)
    loader.read_only(step.samples_read(step.ranks).numpy())
    for first in range(0, len(rows), size):
        tell(f"reference: pair {first:,} of {len(rows):,}")
        numbers = np.arange(first, min(first + size, len(rows)))
        results = step.rows(entries(loader, np.pad(numbers, (0, size - len(numbers)), mode="edge")))
        for i, name in enumerate(names):
            values[numbers, i] = results[name][: len(numbers)].numpy()
    return values


def entries(loader: Loader, numbers: NDArray[np.int64]) -> Batch:
    """Return the batch entries that log-probabilities are computed from."""
    batch = loader.batch(numbers)
    return {name: batch[name] for name in INPUTS}
