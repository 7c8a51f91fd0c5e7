"""Train random models on random meshes with random options, and compare each step with eager PyTorch's in fp64.

    python -m tests.nightly.parity --cases 200 --seed 0                   # counts; shrinks each case that fails
    python -m tests.nightly.parity --case 'decoder rows=3 mesh.tp=2'      # runs one case again
    python -m tests.nightly.parity --cases 2000 --jobs 2 --store parity.jsonl --write docs/measured/parity.md
    python -m tests.nightly.parity --cases 0 --store parity.jsonl --write docs/measured/parity.md    # page only
    python -m tests.nightly.parity --cases 200 --fault copies_not_replicate    # cases needed to detect the fault

A case is right (loss, gradient norm, parameters, buffers and moments agree after each of three steps), refused with a
reason, a crash, or wrong. `--fault` takes a fault of `tools.faults`. Cases that the store lists as right or refused are
not run again. Exit codes: 0 no case is wrong or crashes, 1 one does, 2 bad input.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.config.errors import UserError
from tests.nightly.parity.case import Case
from tests.nightly.parity.draw import cases
from tests.nightly.parity.page import write
from tests.nightly.parity.record import Record, load, run_all, run_case
from tests.nightly.parity.shrink import shrink_case
from tools.faults.plant import planted
from tools.faults.table import FAULTS

FAILS = ("crash", "wrong")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.nightly.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="run a case again, given as the line that this tool printed")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes")
    parser.add_argument("--store", type=Path, help="file to append results to, one JSON object per line")
    parser.add_argument("--write", type=Path, help="page to write from the stored results")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink failing cases")
    parser.add_argument("--all", action="store_true", help="print every case")
    parser.add_argument("--stop", action="store_true", help="stop at the first case that is wrong or crashes")
    parser.add_argument("--fault", help="plant this fault of tools.faults in a copy of the tree; run there, with --stop")
    args = parser.parse_args(arguments)
    if args.fault:
        if args.case or args.store or args.write or args.all or args.jobs > 1:
            parser.error("--fault: takes only --cases, --from and --seed")
        return with_fault(args)
    if args.first >= args.cases > 0:
        parser.error(f"--from: {args.first} leaves none of {args.cases} cases; raise --cases, which counts from 0")
    if args.write and not args.store:
        parser.error("--write: needs results to write; also pass --store")
    try:
        drawn = [Case.parse(args.case)] if args.case else list(cases(args.cases, args.seed))[args.first :]
        if args.store and args.store.exists():
            known = {record.case for record in load(args.store) if record.outcome.verdict not in FAILS}
            drawn = [case for case in drawn if case not in known]
        counts = run(drawn, args)
        if args.write:
            write(load(args.store), args.write)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(counts[verdict] for verdict in FAILS) else 0


def run(drawn: Sequence[Case], args: argparse.Namespace) -> Counter[str]:
    """Run, print and store cases; return the number of cases per verdict."""
    counts, began = Counter[str](), time.perf_counter()
    for number, record in enumerate(run_all(drawn, args.jobs), 1):
        counts[record.outcome.verdict] += 1
        if args.store:
            with args.store.open("a", encoding="utf-8") as stored:
                stored.write(record.dumps() + "\n")
        if args.all or args.case or record.outcome.verdict in FAILS:
            show(number, record, shrink=not args.no_shrink)
        if args.stop and record.outcome.verdict in FAILS:
            break
    seconds, shown = time.perf_counter() - began, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if drawn:
        print(f"{counts.total()} cases in {seconds:.0f} s: {shown}")
    return counts


def with_fault(args: argparse.Namespace) -> int:
    """Run the cases in a copy of the tree with a planted fault, up to the first failure; return its exit code."""
    fault = next((fault for fault in FAULTS if fault.name == args.fault), None)
    if fault is None:
        print(f"error: --fault: {args.fault!r} is not a fault of tools.faults", file=sys.stderr)
        return 2
    print(f"{fault.name}: {fault.means}", flush=True)
    arguments = f"--cases {args.cases} --from {args.first} --seed {args.seed} --stop --no-shrink".split()
    with planted(fault) as folder:
        return subprocess.run([sys.executable, "-m", "tests.nightly.parity", *arguments], cwd=folder, check=False).returncode


def show(number: int, record: Record, shrink: bool) -> None:
    """Print a case, and a smaller one that fails alike."""
    print(f"{number}: {record.case}\n    {record.outcome}", flush=True)
    if shrink and record.outcome.verdict in FAILS:
        smaller = run_case(shrink_case(record.case, record.outcome))
        print(f"    smaller: {smaller.case}\n    {smaller.outcome}", flush=True)
