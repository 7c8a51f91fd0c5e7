"""Give the command hundreds of odd configurations: each has to train, or to be refused in one line.

    python -m tools.odd --count 500 --seed 0

None may end in a traceback, take longer than a minute, leave a folder where it was refused, or run what a file says.
Exit codes: 0 all did, 1 one did not.
"""

from __future__ import annotations

import argparse
import random
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tools.odd.cases import DECODER, SMALL, cases
from tools.odd.files import make
from tools.odd.trial import tried


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; the exit code."""
    takes = argparse.ArgumentParser("python -m tools.odd", description=(__doc__ or "").splitlines()[0])
    takes.add_argument("--count", type=int, default=500)
    takes.add_argument("--seed", type=int, default=0)
    takes.add_argument("--all", action="store_true", help="show what every command said")
    given = takes.parse_args(arguments)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        files = make(Path(scratch, "files"))
        for number, case in enumerate(cases(given.count, files, random.Random(given.seed))):
            outcome = tried(case, Path(scratch, str(number)))
            wrong = outcome.wrong or ("runs what a file says" if any(Path(scratch).rglob("RAN")) else "")
            seen["wrong" if wrong else {0: "trained", 1: "ended", 2: "refused"}[outcome.code or 0]] += 1
            if wrong or given.all:
                odd = [arg for arg in case if arg not in (*SMALL, *DECODER)]
                shown = shlex.join(arg if len(arg) < 200 else f"{arg[:80]}..." for arg in odd)
                print(f"{number}: {shown}\n    {(wrong or outcome.said)[:300]}", flush=True)
        Path(scratch, "files/closed").chmod(0o700)
    counts = ", ".join(f"{count} {what}" for what, count in seen.items())
    print(f"{given.count} commands: {counts}")
    return 1 if seen["wrong"] else 0
