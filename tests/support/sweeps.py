"""Parametrized tests with a few cases in every run, and more with `make test-full`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]  # the number of the value taken from each list of choices
Pair = tuple[int, int, int, int]  # a list, the number of its value, another list, the number of its value


def quick(cases: Iterable[Any], *numbers: int) -> list[Any]:
    """Return the cases (a tuple is several arguments); all but the numbered ones are marked `full`."""
    params = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*p, marks=() if i in numbers else pytest.mark.full) for i, p in enumerate(params)]


def in_turn(*choices: Iterable[Any]) -> list[Any]:
    """Return combinations of the choices that cover each pair of values; all but those for each value are `full`.

    For two lists these are all combinations, for four lists of 4, 7, 4 and 7 values 50 of 784: an error needs two
    values far more often than three. Random trials (`tests/nightly/parity`) draw from all combinations.
    """
    lists = [list(choice) for choice in choices]
    rows = [tuple(i % len(values) for values in lists) for i in range(max(map(len, lists)))]
    always, missing = set(rows), all_pairs(lists).difference(*map(pairs_of, rows))
    for pair in sorted(missing):
        if pair in missing:
            rows.append(row_with(pair, lists, missing))
            missing -= pairs_of(rows[-1])
    return [
        pytest.param(*(values[i] for values, i in zip(lists, row)), marks=() if row in always else pytest.mark.full)
        for row in dict.fromkeys(rows)
    ]


def all_pairs(lists: Sequence[Sequence[Any]]) -> set[Pair]:
    """Return the pairs of values of different lists."""
    numbers = [range(len(values)) for values in lists]
    return {(a, x, b, y) for a, b in combinations(range(len(lists)), 2) for x, y in product(numbers[a], numbers[b])}


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs that a combination covers."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}


def row_with(pair: Pair, lists: Sequence[Sequence[Any]], missing: set[Pair]) -> Row:
    """Return a combination with a pair; its other values greedily cover as many missing pairs as possible."""
    row = {pair[0]: pair[1], pair[2]: pair[3]}

    def met(at: int, value: int) -> int:
        pairs = (((at, value), (b, y)) if at < b else ((b, y), (at, value)) for b, y in row.items())
        return sum((*first, *second) in missing for first, second in pairs)

    for at in range(len(lists)):
        if at not in row:
            row[at] = max(range(len(lists[at])), key=lambda value: met(at, value))
    return tuple(row[at] for at in range(len(lists)))
