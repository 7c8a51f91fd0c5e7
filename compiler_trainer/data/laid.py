"""Lay out a volume's documents in sequences, once per machine: stored on disk, mapped by each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compiler_trainer.data.corpus import Corpus, Ids, split
from compiler_trainer.data.layouts import Layout
from compiler_trainer.data.packing import Facts, PackedRows, pack
from compiler_trainer.data.pairs import PAIRED, split_pairs
from compiler_trainer.places.cache import Cache, get_or_make
from compiler_trainer.places.kept import StoredFolder

FORMAT = 1  # version of the stored files and of their keys
DTYPES = {"starts": np.int64, "sources": np.int64, "continues": np.bool_, "rows": np.int64}
IN_MEMORY = 2**22  # sequences; shorter orders are faster to make than to store


class LayoutSpec(NamedTuple):
    """The parameters of a layout, apart from the documents.

    `seed` decides the order; `documents_before` is the number of documents in earlier volumes.
    """

    seed: list[int]
    documents_before: int
    eval_fraction: float
    seq_len: int
    packing: str


class VolumeRows(NamedTuple):
    """The training and validation sequences, each None without documents.

    With `is_cut`, the validation sequences are the end of one document.
    """

    train: PackedRows | None
    held_out: PackedRows | None
    is_cut: bool


def layout_rows(corpus: Corpus, spec: LayoutSpec, cache: Cache) -> VolumeRows:
    """Return the sequences of a volume, from the cache if they are there."""
    key = [FORMAT, "rows", corpus.fingerprint, corpus.end_of_document, spec]
    volume = get_or_make(cache, key, lambda folder: write_layouts(folder, corpus, spec))
    corpus = replace(corpus, offsets=corpus.offsets[:0].copy())  # the layout replaces them, so unmap them
    train, held_out = (load_rows(volume, half, corpus, spec.seq_len) for half in ("train", "held_out"))
    return VolumeRows(train, held_out, volume.holds["is_cut"])


def write_layouts(folder: Path, corpus: Corpus, spec: LayoutSpec) -> dict[str, Any]:
    """Write both layouts of a volume, and return the facts to store."""
    halves = split_pairs if spec.packing in PAIRED else split
    split_corpus, trained, held_out = halves(corpus, spec.eval_fraction, spec.documents_before)
    np.random.default_rng(spec.seed).shuffle(trained)
    holds = {
        half: write_layout(folder, half, split_corpus, order, spec) for half, order in named_halves(trained, held_out)
    }
    return {**holds, "is_cut": len(split_corpus) > len(corpus)}


def named_halves(trained: Ids, held_out: Ids) -> list[tuple[str, Ids]]:
    """Return (name, documents) of the halves that have documents."""
    return [(half, order) for half, order in (("train", trained), ("held_out", held_out)) if len(order)]


def write_layout(folder: Path, half: str, corpus: Corpus, order: Ids, spec: LayoutSpec) -> Facts:
    """Write one layout, and return its facts."""
    rows = pack(corpus, order, spec.seq_len, spec.packing)
    for name in DTYPES:
        getattr(rows.layout, name).tofile(folder / f"{half}.{name}.bin")
    return rows.facts


def load_rows(volume: StoredFolder, half: str, corpus: Corpus, seq_len: int) -> PackedRows | None:
    """Return the sequences of a stored layout, or None if it has no such half."""
    if half not in volume.holds:
        return None
    facts = Facts(*volume.holds[half])
    arrays = {name: volume.array(f"{half}.{name}", dtype) for name, dtype in DTYPES.items()}
    return PackedRows(corpus, Layout(**arrays, cut_documents=facts.cut_documents), seq_len, facts)


def permutation(count: int, seed: list[int], cache: Cache | None) -> Ids:
    """Return a permutation of the numbers below `count` drawn from `seed`; long ones are stored in the cache."""
    if cache is None or count <= IN_MEMORY:
        return np.random.default_rng(seed).permutation(np.arange(count))
    dtype = np.dtype(np.uint32 if count < 2**32 else np.int64)

    def make(folder: Path) -> None:
        order = np.arange(count, dtype=dtype)
        np.random.default_rng(seed).shuffle(order)
        order.tofile(folder / "order.bin")

    return get_or_make(cache, [FORMAT, "order", count, seed], make).array("order", dtype)
