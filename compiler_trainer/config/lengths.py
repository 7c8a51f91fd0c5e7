"""Lengths of training in options: steps, epochs or tokens."""

from __future__ import annotations

import math
import re

PATTERN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([KMBT]?tokens|epochs?)")
SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def is_length(text: str) -> bool:
    """Return True for a number above 0 of epochs or tokens, as `3epochs` or `1.5Btokens`."""
    match = PATTERN.fullmatch(text)
    return match is not None and float(match[1]) > 0


def steps_of(
    length: str, rows: int, rows_per_step: int, tokens_per_row: float, done: int = 0, rows_done: int = 0
) -> int:
    """Return the least number of steps for a length in epochs of `rows` sequences, or in tokens.

    `done` steps are over, in which `rows_done` sequences were trained on, maybe with another number per step.
    """
    number, unit = PATTERN.fullmatch(length).groups()  # type: ignore[union-attr]
    if unit.startswith("epoch"):
        sequences = float(number) * rows
    else:
        sequences = float(number) * SIZES[unit.removesuffix("tokens")] / tokens_per_row
    return max(1, done + max(0, math.ceil(round((sequences - rows_done) / rows_per_step, 9))))
