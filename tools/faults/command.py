"""Plant faults in the passes, one at a time, and see which checks notice: `python -m tools.faults`.

    python -m tools.faults --only 'ring_*'                         a few
    python -m tools.faults --suite unseen --write docs/measured/faults.md   all; tests for those that no verifier sees

For each fault of `table`, and some of `mutations` in each package, the tree is copied, the fault planted, and some
small models are compiled there with all ranks in one process. Does `passes.verify=spec` refuse them, does `numeric`,
and do two steps differ from plain PyTorch's on one device? The first model that shows anything counts; models that
never run the faulty code are skipped. With `--suite` the tests run too, up to the first failure. The tree without a
fault goes first; if anything fails there, only that is reported.

Results are appended to a file, a line of JSON each, and are not computed again: remove the file when the tree has
changed. Exit codes: 0 done, 1 the tree itself is at fault, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

from tools.faults.fault import Fault
from tools.faults.models import CASES
from tools.faults.mutations import mutations
from tools.faults.page import page
from tools.faults.plant import LOOKS_FIRST, Judge, mutated, planted, tested
from tools.faults.reach import reached
from tools.faults.table import FAULTS

UNMUTATED = "(none)"
VERDICT = ("spec", "numeric", "value")
Record = dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse(arguments)
    faults = [*FAULTS, *mutations(options.mutations)]
    chosen = [fault for fault in faults if fnmatchcase(fault.name, options.only)]
    try:
        if not chosen:
            raise ValueError(f"--only: no fault matches {options.only!r}")
        for fault in chosen:
            mutated(fault)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    known = read(options.results)
    with closing(Judge()) as judge:
        for fault in chosen if sound(faults, known, judge, options) else ():
            for part in missing(fault, known, judge, options):
                learn(known, fault.name, part, options)
            print(f"{fault.name}: {line(known[fault.name])}", flush=True)
    if any(known[UNMUTATED][who] for who in VERDICT):
        print(f"something is wrong without any fault: {known[UNMUTATED]}", file=sys.stderr)
        return 1
    if options.write:
        options.write.write_text(page(faults, known))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults named so")
    parser.add_argument("--mutations", type=int, default=10, metavar="COUNT", help="faults by syntax in each room")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), help="models to compile")
    parser.add_argument("--suite", choices=("none", "unseen", "all"), default="none", help="for which to run the tests")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for the tests of one fault")
    parser.add_argument("--results", type=Path, default=Path("faults.jsonl"), help="where results are kept")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page for the table of results, in Markdown")
    return parser.parse_args(arguments)


def sound(faults: Sequence[Fault], known: dict[str, Record], judge: Judge, options: argparse.Namespace) -> bool:
    """Return True if nothing is noticed without a fault; then record which models run the code of each fault."""
    if UNMUTATED not in known:
        with planted(None) as folder:
            learn(known, UNMUTATED, judge(folder, options.models, options.limit), options)
    if any(fault.name not in known for fault in faults):
        for name, models in reached(faults, options.models).items():
            if name not in known:
                learn(known, name, {"models": " ".join(models)}, options)
    return not any(known[UNMUTATED][who] for who in VERDICT)


def missing(fault: Fault, known: dict[str, Record], judge: Judge, options: argparse.Namespace) -> Iterator[Record]:
    """Yield the results of a fault that are requested and not known yet."""
    record, first = known[fault.name], LOOKS_FIRST.get(fault.room)
    with planted(fault) as folder:
        if "value" not in record:
            models = sorted(record["models"].split(), key=lambda model: model != first)
            yield judge(folder, models, options.limit)
        unseen = not known[fault.name]["spec"] and not known[fault.name]["numeric"]
        if "suite" not in record and (options.suite == "all" or options.suite == "unseen" and unseen):
            yield {"suite": tested(folder, fault, options.limit)}


def learn(known: dict[str, Record], name: str, part: Record, options: argparse.Namespace) -> None:
    """Record a result, also in the file."""
    known[name] = known.get(name, {}) | part
    with options.results.open("a") as file:
        file.write(json.dumps({"fault": name} | part) + "\n")


def line(record: Record) -> str:
    """Return a line with the checks that notice a fault."""
    checks = ", ".join(who for who in VERDICT if record[who]) or (
        "nothing" if record["models"] else "no model comes by"
    )
    return f"{checks} {record.get('suite', '')}".rstrip()


def read(path: Path) -> dict[str, Record]:
    """Return the known results of each fault."""
    known: dict[str, Record] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(text)
        name = record.pop("fault")
        known[name] = known.get(name, {}) | record
    return known
