"""Run the command with hundreds of odd configurations: each must train or be refused in one line.

    python -m tests.nightly.odd --count 500 --seed 0
    python -m tests.nightly.odd --runs --count 300      # damaged run folders, for resume, eval, ..., inspect, ...

A damaged file may be passed over if the command has a substitute, such as an older checkpoint, or does not read it.
No command may end in a traceback, take longer than a minute, leave files after a refusal, or run code from a file.
Exit codes: 0 all commands passed, 1 one did not.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.nightly.odd.cases import DECODER, SMALL, cases
from tests.nightly.odd.files import make
from tests.nightly.odd.runs import run_damaged, train_run, trials
from tests.nightly.odd.trial import Outcome, run_command

ENDS = {False: ("trained", "ended", "refused"), True: ("done", "ended", "refused")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.nightly.odd", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", action="store_true", help="run commands that read run folders on damaged ones")
    parser.add_argument("--all", action="store_true", help="print the output of every command")
    args = parser.parse_args(arguments)
    endings: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = of_runs if args.runs else of_options
        for number, (shown, outcome) in enumerate(outcomes(args.count, Path(scratch), random.Random(args.seed))):
            endings["wrong" if outcome.wrong else ENDS[args.runs][outcome.code or 0]] += 1
            if outcome.wrong or args.all:
                print(f"{number}: {shown}\n    {(outcome.wrong or outcome.stderr)[:300]}", flush=True)
    counts = ", ".join(f"{count} {ending}" for ending, count in endings.items())
    print(f"{args.count} commands: {counts}")
    return 1 if endings["wrong"] else 0


def of_options(count: int, scratch: Path, draw: random.Random) -> Iterator[tuple[str, Outcome]]:
    """Yield (odd arguments, outcome) of commands with odd options and hostile files."""
    files = make(scratch / "files")
    for number, case in enumerate(cases(count, files, draw)):
        outcome = run_command(case, scratch / str(number))
        if any(scratch.rglob("RAN")):
            outcome = outcome._replace(wrong="runs code from a file")
        odd = [arg for arg in case if arg not in (*SMALL, *DECODER)]
        yield shlex.join(arg if len(arg) < 200 else f"{arg[:80]}..." for arg in odd), outcome
    (scratch / "files/closed").chmod(0o700)


def of_runs(count: int, scratch: Path, draw: random.Random) -> Iterator[tuple[str, Outcome]]:
    """Yield (trial, outcome) of commands on damaged run folders."""
    run = train_run(scratch / "trained")
    for number, trial in enumerate(trials(count, run, draw)):
        yield str(trial), run_damaged(trial, run, scratch / str(number))
        shutil.rmtree(scratch / str(number))
