"""The arrangement of documents in rows, and that of conversations with images."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.corpus import Corpus, Ids

PADDING = -1


class Layout(NamedTuple):
    """Pieces of a corpus laid end to end in a stream; each `seq_len` tokens of it are a row (a training sequence).

    Piece i has the corpus tokens from `sources[i]` on, or padding if that is PADDING; it fills the stream from
    `starts[i]` to `starts[i + 1]`.
    """

    starts: Ids  # [pieces + 1]
    sources: Ids  # [pieces]
    continues: NDArray[np.bool_]  # True if a piece's document continues in a row that is not the next
    rows: Ids  # the rows that have a label
    cut_documents: int  # number of documents whose labels are in several rows


def with_images(corpus: Corpus, order: Ids, seq_len: int, images: int, image_tokens: int = 0) -> Layout:
    """Lay whole documents into rows in their order, while there is room for their tokens and at most `images` images.

    With `image_tokens`, a row has at most that many tokens of images. Raises UserError if a document alone is too long,
    or has too many images or tokens of these.
    """
    assert corpus.images is not None
    lengths = corpus.lengths(order)
    counts = np.diff(np.searchsorted(corpus.images.at, corpus.offsets))[order]
    if lengths.max(initial=0) > seq_len:
        problem = f"is {seq_len:,}, and a conversation has {lengths.max():,} tokens with its images"
        raise UserError("train.seq_len", f"{problem}; increase it, because no image is cut")
    if counts.max(initial=0) > images:
        raise UserError("data.images_per_row", f"is {images}, and a conversation has {counts.max()}; increase it")
    needs = np.stack([lengths, counts], 1)
    limits = np.array([seq_len, images])
    if image_tokens:
        needs, limits = np.column_stack([needs, corpus.image_tokens()[order]]), np.append(limits, image_tokens)
        if (most := needs[:, 2].max(initial=0)) > image_tokens:
            problem = f"is {image_tokens:,}, and the images of a conversation have {most:,} tokens"
            raise UserError("data.image_tokens_per_row", f"{problem}; increase it, or resize images (data.image_size)")
    sizes, sources, room = list[int](), list[int](), limits.copy()
    for source, need in zip(corpus.offsets[order].tolist(), needs):
        if (need > room).any():
            sizes.append(int(room[0]))
            sources.append(PADDING)
            room = limits.copy()
        sizes.append(int(need[0]))
        sources.append(source)
        room -= need
    sizes.append(int(room[0]))
    sources.append(PADDING)
    has_tokens = np.array(sizes) > 0
    starts = np.concatenate(([0], np.cumsum(np.array(sizes)[has_tokens])))
    rows = np.arange(starts[-1] // seq_len)
    return Layout(starts, np.array(sources)[has_tokens], np.zeros(int(has_tokens.sum()), bool), rows, 0)
