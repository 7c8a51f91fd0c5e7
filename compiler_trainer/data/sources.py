"""Where documents come from: the interpreter's library, files, or a generator; every source yields plain text."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.files import file_documents, read_text

STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STDLIB_SIZE_MAX_BYTES = 16 * 2**20
SYNTHETIC_ALPHABET = " abcdefghijklmnopqrstuvwxyz"
SYNTHETIC_SUCCESSOR_ODDS = (0.6, 0.2, 0.15, 0.05)
SYNTHETIC_LENGTHS_CHARS = (64, 1024)


def documents(cfg: DataConfig) -> Iterator[str]:
    """Every document of the source `cfg.name`, in an order that never changes; raises UserError on bad input."""
    return SOURCES[cfg.name](cfg)


def stdlib_documents(cfg: DataConfig) -> Iterator[str]:
    """The interpreter's own library without its tests, a document a `.py` file, by path, up to 16 MiB in all."""
    size_bytes = 0
    for path in stdlib_files(Path(sysconfig.get_paths()["stdlib"])):
        size_bytes += path.stat().st_size
        if size_bytes > STDLIB_SIZE_MAX_BYTES:
            return
        yield read_text(path)


def stdlib_files(root: Path) -> list[Path]:
    """Sorted `.py` files below `root`, outside tests and installed packages."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def synthetic_documents(cfg: DataConfig) -> Iterator[str]:
    """`cfg.documents` walks of one Markov chain over 27 characters; its entropy is 1.06 nats a character."""
    symbols = np.arange(len(SYNTHETIC_ALPHABET))
    rng = np.random.default_rng(cfg.seed)
    successors = [rng.choice(symbols, len(SYNTHETIC_SUCCESSOR_ODDS), replace=False).tolist() for _ in symbols]
    for index in range(cfg.documents):
        yield markov_walk(successors, np.random.default_rng([cfg.seed, index]))


def markov_walk(successors: list[list[int]], rng: np.random.Generator) -> str:
    """A walk of 64 to 1023 characters, started anywhere."""
    length = int(rng.integers(*SYNTHETIC_LENGTHS_CHARS))
    state = int(rng.integers(len(successors)))
    walk = []
    for choice in rng.choice(len(SYNTHETIC_SUCCESSOR_ODDS), length, p=SYNTHETIC_SUCCESSOR_ODDS).tolist():
        walk.append(SYNTHETIC_ALPHABET[state])
        state = successors[state][choice]
    return "".join(walk)


SOURCES: dict[str, Callable[[DataConfig], Iterator[str]]] = {
    "stdlib": stdlib_documents,
    "text": lambda cfg: file_documents(cfg.files),
    "synthetic": synthetic_documents,
}
