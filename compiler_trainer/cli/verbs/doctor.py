"""`doctor`: describe this machine, and try each feature of the trainer with a small step.

    compiler-trainer doctor                # features of one device
    compiler-trainer doctor --ranks 8      # features of several: FSDP, tensor, context, expert and pipeline parallelism
    compiler-trainer doctor --only float8  # features whose names match a pattern

Exit codes: 0 all features work, 1 a feature fails.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch

from rich.table import Table

from compiler_trainer.cli.table import parser
from compiler_trainer.config.errors import UserError
from compiler_trainer.console import wide
from compiler_trainer.doctor.machine import facts
from compiler_trainer.doctor.probes import Probe, Tried, probes, tried
from compiler_trainer.elastic.launcher import Launcher
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks

HEAD = ("feature", "", "seconds", "worst error", "allowed", "options", "what to do")


def main(arguments: Sequence[str]) -> int:
    """Print the machine and try each feature; return the exit code."""
    arg_parser = parser("doctor")
    arg_parser.add_argument("--ranks", type=int, default=1, help="ranks to start on this machine (default 1)")
    arg_parser.add_argument("--only", default="*", metavar="PATTERN", help="features to try, as 'C*' (default all)")
    args = arg_parser.parse_args(arguments)
    if args.ranks > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "compiler_trainer", "doctor", "--only", args.only]
        return Launcher(args.ranks, command).run()
    ranks = start_ranks()
    chosen = [probe for probe in probes(ranks) if fnmatch(probe.name, args.only)]
    if not chosen:
        raise UserError("--only", f"{args.only!r} matches none of {', '.join(probe.name for probe in probes(ranks))}")
    try:
        return examined(ranks, chosen)
    finally:
        stop_ranks()


def examined(ranks: int, chosen: Sequence[Probe]) -> int:
    """Print the tables on rank 0; return the exit code."""
    console = wide(highlight=False, markup=False, quiet=rank() > 0)
    if rank() == 0:
        table = Table("", "this machine", "what to do", show_lines=False)
        for fact in facts():
            table.add_row(fact.name, fact.text, fact.fix)
        console.print(table)
    began, results = time.perf_counter(), []
    for probe in chosen:
        console.print(f"{probe.name} ...")
        results.append(tried(probe, ranks))
        console.print(f"  {'works' if results[-1].works else 'FAILS'}, {results[-1].seconds:.1f} s")
    console.print(shown(results))
    works = sum(result.works for result in results)
    console.print(f"{works} of {len(results)} features work, ranks: {ranks}, {time.perf_counter() - began:.0f} s")
    return 0 if works == len(results) else 1


def shown(results: Sequence[Tried]) -> Table:
    """Return a table with a row for each feature. A failure like an earlier one refers to that one."""
    table, first_by_reason = Table(*HEAD), dict[str, str]()
    for result in results:
        probe, advice = result.probe, "" if result.works else "; ".join(filter(None, (result.why, result.probe.fix)))
        advice = f"as {first_by_reason[result.why]}" if result.why in first_by_reason else advice
        if result.why:
            first_by_reason.setdefault(result.why, probe.name)
        figures = f"{result.seconds:.1f}", f"{result.error:.0e}", f"{probe.allowed:.0e}"
        table.add_row(probe.name, "works" if result.works else "FAILS", *figures, " ".join(probe.options), advice)
    return table
