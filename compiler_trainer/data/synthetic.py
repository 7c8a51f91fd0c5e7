"""Documents drawn from a seed: walks of one Markov chain over 27 characters.

Its entropy is 1.06 nats a character.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
SUCCESSOR_ODDS = (0.6, 0.2, 0.15, 0.05)
LENGTHS_CHARS = (64, 1024)


def walks(seed: int, start: int, end: int) -> Iterator[str]:
    """Yield walks `start` to before `end` of the chain of a seed."""
    symbols = np.arange(len(ALPHABET))
    rng = np.random.default_rng(seed)
    successors = [rng.choice(symbols, len(SUCCESSOR_ODDS), replace=False).tolist() for _ in symbols]
    for index in range(start, end):
        yield walk(successors, np.random.default_rng([seed, index]))


def walk(successors: list[list[int]], rng: np.random.Generator) -> str:
    """Return a walk of 64 to 1023 characters from a random start."""
    length = int(rng.integers(*LENGTHS_CHARS))
    state = int(rng.integers(len(successors)))
    letters = []
    for choice in rng.choice(len(SUCCESSOR_ODDS), length, p=SUCCESSOR_ODDS).tolist():
        letters.append(ALPHABET[state])
        state = successors[state][choice]
    return "".join(letters)
