"""Make a failing case smaller for as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from compiler_trainer.parity.compare import Outcome
from tests.nightly.parity.case import SMALLEST, Case

BELOW = {"rows": 1, "length": 1, "seed": 0}  # how far these may shrink


def shrunk(case: Case, outcome: Outcome, run: Callable[[Case], Outcome] = Case.run, tries: int = 60) -> Case:
    """The smallest case found that fails as this one does, in at most so many runs."""
    left, tried = tries, {str(case)}

    def still_fails(candidate: Case) -> bool:
        nonlocal left
        if str(candidate) in tried or left == 0:
            return False
        tried.add(str(candidate))
        left -= 1
        try:
            return run(candidate).verdict == outcome.verdict
        except Exception:  # no case: its model cannot be built, or eager PyTorch not train it
            return False

    while (smaller := next(filter(still_fails, simpler(case)), None)) is not None:
        case = smaller
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one option less, or one that is smaller."""
    for at in range(len(case.options)):
        yield replace(case, options=case.options[:at] + case.options[at + 1 :])
    for at, (name, value) in enumerate(case.options):
        for smaller in less(name, value):
            yield replace(case, options=(*case.options[:at], (name, smaller), *case.options[at + 1 :]))
    for name in SMALLEST.keys() - {"seed"} - case.given.keys():
        for smaller in less(name, SMALLEST[name]):
            yield replace(case, options=(*case.options, (name, smaller)))


def less(name: str, value: Any) -> Iterator[Any]:
    """Smaller values of an option."""
    if isinstance(value, int) and not isinstance(value, bool):
        least = BELOW.get(name, 2)
        yield from sorted({least, (value + least) // 2, value - 1} & set(range(least, value)))
    if isinstance(value, dict) and len(value) > 1:
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
