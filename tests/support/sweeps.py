"""Parametrized tests of which a few cases always run, and all by `make test-full`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], *numbers: int) -> list[Any]:
    """The cases, a tuple being several arguments; all but those numbered are marked `full`."""
    params = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*p, marks=() if i in numbers else pytest.mark.full) for i, p in enumerate(params)]


def in_turn(*choices: Iterable[Any]) -> list[Any]:
    """All combinations of the choices; not `full` are those in which each is met once, side by side."""
    lists = [list(choice) for choice in choices]
    longest = max(map(len, lists))
    chosen = {tuple(i % len(choice) for choice in lists) for i in range(longest)}
    found: list[tuple[Any, tuple[int, ...]]] = [((), ())]
    for choice in lists:
        found = [((*values, value), (*at, i)) for values, at in found for i, value in enumerate(choice)]
    return [pytest.param(*values, marks=() if at in chosen else pytest.mark.full) for values, at in found]
