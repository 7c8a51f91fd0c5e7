"""All documents as one array of token ids, split into training and validation documents."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.shard import Summary
from compiler_trainer.data.tokenizers import Tokenizer, dtype_of
from compiler_trainer.places.kept import StoredFolder

Ids = NDArray[np.int64]
DOCUMENTS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Corpus:
    """The documents: document i is `tokens[offsets[i]:offsets[i + 1]]` and ends with the `end_of_document` token.

    The arrays are in memory or mapped from disk. `fingerprint` depends on every token and boundary.
    """

    tokens: NDArray[np.unsignedinteger]  # uint16 if the vocabulary allows, else uint32
    offsets: Ids  # [documents + 1]
    end_of_document: int
    fingerprint: str
    counted: NDArray[np.bool_] | None = None  # True for tokens that are labels; None if all are
    continues: NDArray[np.bool_] | None = None  # True for documents of the same record as the previous one

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, documents: Ids) -> Ids:
        """Return the numbers of tokens of the given documents."""
        return self.offsets[documents + 1] - self.offsets[documents]


def map_volume(volume: StoredFolder, tokenizer: Tokenizer, is_chat: bool) -> Corpus:
    """Return the documents of a volume, mapped from disk."""
    return Corpus(
        volume.array("tokens", dtype_of(tokenizer.vocab_size)),
        np.asarray(np.memmap(volume.folder / "offsets.bin", np.int64, mode="r")),
        tokenizer.end_of_document,
        Summary(*volume.holds).digest,
        volume.array("counted", bool) if is_chat else None,
        volume.array("continues", bool) if is_chat else None,
    )


def split(corpus: Corpus, eval_fraction: float, documents_before: int = 0) -> tuple[Corpus, Ids, Ids]:
    """Return the corpus, its training documents and its validation documents, each ascending.

    `documents_before` is the number of documents in earlier volumes. A document is in the validation half if the hash
    of its index is below `eval_fraction`, so the split depends neither on the seed nor on the length of the corpus. If
    few documents make that half empty or far too large, the end of the longest document is cut off instead and becomes
    the validation document. Samples of one record are in the same half.
    """
    if eval_fraction in (0, 1):
        all_documents, no_documents = np.arange(len(corpus)), np.arange(0)
        return corpus, *((no_documents, all_documents) if eval_fraction else (all_documents, no_documents))
    is_validation = draw_validation(len(corpus), eval_fraction, documents_before)
    if corpus.continues is not None:
        first = np.where(corpus.continues, 0, np.arange(len(corpus)))
        is_validation = is_validation[np.maximum.accumulate(first)]
    trained, validation = np.flatnonzero(~is_validation), np.flatnonzero(is_validation)
    share = corpus.lengths(validation).sum() / len(corpus.tokens)
    if 0 < share < (1 + eval_fraction) / 2:
        return corpus, trained, validation
    corpus, tail = cut_tail(corpus, eval_fraction)
    indices = np.arange(len(corpus))
    return corpus, indices[indices != tail], indices[indices == tail]


def draw_validation(count: int, fraction: float, documents_before: int) -> NDArray[np.bool_]:
    """Return bool[count], True for validation documents."""
    is_validation = np.empty(count, bool)
    for start in range(0, count, DOCUMENTS_AT_ONCE):
        end = min(start + DOCUMENTS_AT_ONCE, count)
        is_validation[start:end] = unit_hash(np.arange(documents_before + start, documents_before + end)) < fraction
    return is_validation


def cut_tail(corpus: Corpus, eval_fraction: float) -> tuple[Corpus, int]:
    """Return the corpus with its longest document cut in two, and the index of the second part.

    That part has `eval_fraction` of the document's tokens.
    """
    lengths = np.diff(corpus.offsets)
    longest = int(lengths.argmax())
    if lengths[longest] < 4:  # each part needs a token and its target
        raise UserError(
            "data.eval_fraction", "no document is long enough to split off a validation part; set data.eval_fraction=0"
        )
    tail = np.clip(round(eval_fraction * lengths[longest]), 2, lengths[longest] - 2)
    offsets = np.insert(corpus.offsets, longest + 1, corpus.offsets[longest + 1] - tail)
    return replace(corpus, offsets=offsets), longest + 1


def unit_hash(indices: Ids) -> NDArray[np.float64]:
    """Return fixed pseudorandom numbers in [0, 1) for document indices: SplitMix64 (doi:10.1145/2660193.2660195)."""
    mixed = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) / 2.0**64


def hash_arrays(*arrays: NDArray[np.generic]) -> str:
    """Return sixteen hex digits that depend on every byte of the arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
