"""All documents as one array of token ids, and which of them are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.tokenizers import Tokenizer

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Document i is `tokens[offsets[i]:offsets[i + 1]]`, closed by the `end_of_document` token."""

    tokens: NDArray[np.unsignedinteger]  # uint16 where the vocabulary allows, else uint32
    offsets: Ids  # [documents + 1]
    end_of_document: int
    documents: int  # read from the source; the empty ones hold nothing to predict and are left out
    empty_documents: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every token and boundary."""
        return hash_arrays(self.tokens, self.offsets)


def build_corpus(texts: Iterable[str], tokenizer: Tokenizer, where: str) -> Corpus:
    """Tokenize `texts`, read from `where`, holding one copy of the ids; raises UserError if there are none."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    content = bytearray()  # grows in place, and numpy reads it without a copy
    offsets, empty_documents = [0], 0
    end = np.array([tokenizer.end_of_document], dtype).tobytes()
    for ids in tokenizer.encode(texts):
        if not len(ids):
            empty_documents += 1
            continue
        content += ids.astype(dtype).tobytes()
        content += end
        offsets.append(len(content) // dtype.itemsize)
    if len(offsets) == 1:
        raise UserError(where, f"the corpus is empty: {empty_documents} documents, none with a token in it")
    tokens = np.frombuffer(content, dtype)
    documents = len(offsets) - 1 + empty_documents
    return Corpus(tokens, np.array(offsets), tokenizer.end_of_document, documents, empty_documents)


def split(corpus: Corpus, eval_fraction: float) -> tuple[Corpus, Ids, Ids]:
    """The corpus, the documents to train on and those held out, each ascending.

    A document is held out where the hash of its index falls below `eval_fraction`, so the choice outlives a new seed
    and a longer corpus. Where a handful of documents makes that no tokens or far too many, the end of the longest one
    is cut off instead and becomes the held-out document.
    """
    if eval_fraction == 0:
        return corpus, np.arange(len(corpus)), np.arange(0)
    held_out = np.array([unit_hash(index) < eval_fraction for index in range(len(corpus))])
    share = np.diff(corpus.offsets)[held_out].sum() / len(corpus.tokens)
    if 0 < share < (1 + eval_fraction) / 2:
        return corpus, np.flatnonzero(~held_out), np.flatnonzero(held_out)
    corpus, tail = cut_tail(corpus, eval_fraction)
    indices = np.arange(len(corpus))
    return corpus, indices[indices != tail], indices[indices == tail]


def cut_tail(corpus: Corpus, eval_fraction: float) -> tuple[Corpus, int]:
    """The corpus with its longest document cut in two, and the index of the second part, `eval_fraction` of it."""
    lengths = np.diff(corpus.offsets)
    longest = int(lengths.argmax())
    if lengths[longest] < 4:  # either part needs a token and its target
        raise UserError("data.eval_fraction", "no document is long enough to hold a part out; set data.eval_fraction=0")
    tail = np.clip(round(eval_fraction * lengths[longest]), 2, lengths[longest] - 2)
    offsets = np.insert(corpus.offsets, longest + 1, corpus.offsets[longest + 1] - tail)
    return replace(corpus, offsets=offsets), longest + 1


def unit_hash(index: int) -> float:
    """A fixed pseudo-random number in [0, 1) for a document's index."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def hash_arrays(*arrays: NDArray[np.generic]) -> str:
    """Sixteen hex digits that depend on every byte of the arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
