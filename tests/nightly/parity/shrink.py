"""Shrink a failing case as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from compiler_trainer.parity.compare import Outcome
from tests.nightly.parity.case import SMALLEST, Case

BELOW = {"rows": 1, "length": 1, "seed": 0}  # lower bounds of these


def shrink_case(case: Case, outcome: Outcome, run: Callable[[Case], Outcome] = Case.run, tries: int = 60) -> Case:
    """Return the smallest case with the same verdict, found in at most `tries` runs."""
    runs_left, tried = tries, {str(case)}

    def still_fails(candidate: Case) -> bool:
        nonlocal runs_left
        if str(candidate) in tried or runs_left == 0:
            return False
        tried.add(str(candidate))
        runs_left -= 1
        try:
            return run(candidate).verdict == outcome.verdict
        except Exception:  # invalid case: its model cannot be built, or eager PyTorch cannot train it
            return False

    while (smaller := next(filter(still_fails, simpler(case)), None)) is not None:
        case = smaller
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one option less, or with one smaller option."""
    for at in range(len(case.options)):
        yield replace(case, options=case.options[:at] + case.options[at + 1 :])
    for at, (name, value) in enumerate(case.options):
        for smaller in smaller_values(name, value):
            yield replace(case, options=(*case.options[:at], (name, smaller), *case.options[at + 1 :]))
    for name in SMALLEST.keys() - {"seed"} - case.named_options.keys():
        for smaller in smaller_values(name, SMALLEST[name]):
            yield replace(case, options=(*case.options, (name, smaller)))


def smaller_values(name: str, value: Any) -> Iterator[Any]:
    """Yield smaller values of an option."""
    if isinstance(value, int) and not isinstance(value, bool):
        least = BELOW.get(name, 2)
        yield from sorted({least, (value + least) // 2, value - 1} & set(range(least, value)))
    if isinstance(value, dict) and len(value) > 1:
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
