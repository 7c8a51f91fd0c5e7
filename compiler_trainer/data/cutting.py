"""Where a text may be cut so that its parts give the tokens that the whole gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from mmap import mmap

import numpy as np
from numpy.typing import NDArray

Encode = Callable[[list[str]], list[NDArray[np.integer]]]

BEFORE_SPACE = re.compile(rb"\S(?=\s\S)")
TRIES = 200
WINDOW_BYTES = 256
PART_BYTES = 2**17  # a tokenizer takes up to five hundred bytes of memory for each


def next_cut(content: bytes | mmap, at: int, encode: Encode) -> int:
    """The first place from byte `at` on where two parts give the tokens of the whole; the end where none is near."""
    for found in islice(BEFORE_SPACE.finditer(content, at), TRIES):
        if is_seamless(content, found.end(), encode):
            return found.end()
    return len(content)


def is_seamless(content: bytes | mmap, cut: int, encode: Encode) -> bool:
    """Whether what surrounds a cut is tokenized alike in one part and in two."""
    before = content[max(0, cut - WINDOW_BYTES) : cut].decode(errors="ignore")
    after = content[cut : cut + WINDOW_BYTES].decode(errors="ignore")
    whole, left, right = encode([before + after, before, after])
    return np.array_equal(whole, np.concatenate((left, right)))


def parts(text: str, encode: Encode) -> Iterator[str]:
    """A text in parts of about 128 KiB, as far as it can be cut."""
    if len(text) <= PART_BYTES:
        yield text
        return
    content, start = text.encode(), 0
    while start < len(content):
        end = next_cut(content, start + PART_BYTES, encode)
        yield content[start:end].decode()
        start = end
