"""Compare the captured programs of random models with eager PyTorch: loss, gradients and buffers.

    python -m tests.nightly.capture_fuzz --cases 2000               # counts; shrinks each case that is wrong or crashes
    python -m tests.nightly.capture_fuzz --case 0:17                # runs one case again and prints its source
    python -m tests.nightly.capture_fuzz --cases 2000 --refused     # also prints the reasons of refusals

Cases that eager PyTorch itself cannot run are skipped and not counted. Exit codes: 0 no case is wrong or crashes, 1 one
does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch

from tests.nightly.capture_fuzz.draw import Case, case
from tests.nightly.capture_fuzz.run import Outcome, run, shrink_case

FAILS = ("wrong", "crash")


def outcomes(seed: int, first: int = 0) -> Iterator[tuple[Case, Outcome]]:
    """Yield random cases that eager PyTorch can run, without end, with their outcomes."""
    for number in count(first):
        drawn = case(seed, number)
        outcome = run(drawn)
        if outcome.verdict != "invalid":
            yield drawn, outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; return the exit code."""
    options = argparse.ArgumentParser("python -m tests.nightly.capture_fuzz", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cases", type=int, default=200)
    options.add_argument("--from", type=int, default=0, dest="first", help="the number of the first case")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--case", help="SEED:NUMBER of a case to run again")
    options.add_argument("--refused", action="store_true", help="print the reasons of refusals")
    options.add_argument("--no-shrink", action="store_true", help="do not shrink failing cases")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.case:
        drawn = case(*map(int, chosen.case.split(":")))
        outcome = run(drawn)
        show(drawn, outcome)
        return int(outcome.verdict in FAILS)
    began, counts, reasons = time.perf_counter(), Counter[str](), Counter[str]()
    for drawn, outcome in islice(outcomes(chosen.seed, chosen.first), chosen.cases):
        counts[outcome.verdict] += 1
        if outcome.verdict == "refused":
            reasons[outcome.why.split(" ", 2)[-1]] += 1
        if outcome.verdict in FAILS:
            smaller = drawn if chosen.no_shrink else shrink_case(drawn, outcome)
            show(smaller, run(smaller))
    if chosen.refused:
        for reason, times in reasons.most_common():
            print(f"{times:5} refused: {reason}")
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    print(f"{counts.total()} cases in {time.perf_counter() - began:.0f} s: {verdicts}")
    return int(any(counts[verdict] for verdict in FAILS))


def show(drawn: Case, outcome: Outcome) -> None:
    """Print a case with its outcome."""
    print(f"{drawn.number} ({drawn.dtype}): {outcome.verdict} {outcome.why}\n{drawn.source()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
