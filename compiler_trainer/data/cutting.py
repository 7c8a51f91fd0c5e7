"""Find positions where a text can be cut such that its parts give the same tokens as the full text."""

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
PART_BYTES = 2**17  # tokenizers need up to 500 bytes of memory for each of them


def next_cut(content: bytes | mmap, at: int, encode: Encode) -> int:
    """Return the first position from byte `at` on where the two parts give the tokens of the full text.

    Returns the end of the text if there is none nearby.
    """
    for match in islice(BEFORE_SPACE.finditer(content, at), TRIES):
        if is_seamless(content, match.end(), encode):
            return match.end()
    return len(content)


def is_seamless(content: bytes | mmap, cut: int, encode: Encode) -> bool:
    """Return True if the text around a cut gives the same tokens in two parts as in one."""
    left_text = content[max(0, cut - WINDOW_BYTES) : cut].decode(errors="ignore")
    right_text = content[cut : cut + WINDOW_BYTES].decode(errors="ignore")
    together, left, right = encode([left_text + right_text, left_text, right_text])
    return np.array_equal(together, np.concatenate((left, right)))


def parts(text: str, encode: Encode) -> Iterator[str]:
    """Yield a text in parts of about 128 KiB, as far as it can be cut."""
    if len(text) <= PART_BYTES:
        yield text
        return
    content, start = text.encode(), 0
    while start < len(content):
        end = next_cut(content, start + PART_BYTES, encode)
        yield content[start:end].decode()
        start = end
