"""Rows of documents of uneven lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SPECIAL, VOCABULARY = 3, 300  # random ids are between these


class Span(NamedTuple):
    """A document of a row: its tokens from `start` to before `end`."""

    row: int
    start: int
    end: int


def documents_in_rows(draw: torch.Generator, lengths: list[tuple[int, int, int]], size: int) -> tuple[dict[str, Tensor], Iterator[Span]]:
    """Return rows of `size` random tokens without labels, and their documents.

    `lengths` has for each row the least and the excluded length of a document, and their number.
    """
    tokens = torch.randint(SPECIAL, VOCABULARY, (len(lengths), size), generator=draw)
    batch = {"tokens": tokens, "labels": torch.full_like(tokens, -100), "positions": torch.zeros_like(tokens),
             "documents": torch.full_like(tokens, -1)}  # fmt: skip
    spans = []
    for row, (least, most, count) in enumerate(lengths):
        start = 0
        for document, length in enumerate(torch.randint(least, most, (count,), generator=draw).tolist()):
            end = start + length
            batch["documents"][row, start:end], batch["positions"][row, start:end] = document, torch.arange(length)
            spans.append(Span(row, start, end))
            start = end
    return batch, iter(spans)
