"""`doctor`: describe this machine, and try each feature of the trainer with a small step.

    compiler-trainer doctor                # features of one device
    compiler-trainer doctor --ranks 8      # features of several: FSDP, tensor, context, expert and pipeline parallelism
    compiler-trainer doctor --only float8  # features whose names match a pattern

Exit codes: 0 all features work, 1 a feature fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from fnmatch import fnmatch

from rich.table import Table

from compiler_trainer.cli.table import parser
from compiler_trainer.cli.verbs.launch import started
from compiler_trainer.config.errors import UserError
from compiler_trainer.console import wide
from compiler_trainer.doctor.machine import facts
from compiler_trainer.doctor.probes import Probe, Tried, probes, tried
from compiler_trainer.step.ranks import rank, start_ranks, stop_ranks

HEAD = ("feature", "", "seconds", "worst error", "allowed", "options", "what to do")


def main(arguments: Sequence[str]) -> int:
    """Print the machine and try each feature; return the exit code."""
    takes = parser("doctor")
    takes.add_argument("--ranks", type=int, default=1, help="how many ranks of this machine to start (1)")
    takes.add_argument("--only", default="*", metavar="PATTERN", help="features to try, 'C*' for instance (all)")
    given = takes.parse_args(arguments)
    if given.ranks > 1 and "RANK" not in os.environ:
        return started([f"--nproc-per-node={given.ranks}", "-m", "compiler_trainer", "doctor", "--only", given.only])
    ranks = start_ranks()
    chosen = [probe for probe in probes(ranks) if fnmatch(probe.name, given.only)]
    if not chosen:
        raise UserError("--only", f"{given.only!r} names none of {', '.join(probe.name for probe in probes(ranks))}")
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
            table.add_row(fact.name, fact.said, fact.fix)
        console.print(table)
    began, found = time.perf_counter(), []
    for probe in chosen:
        console.print(f"{probe.name} ...")
        found.append(tried(probe, ranks))
        console.print(f"  {'works' if found[-1].works else 'FAILS'}, {found[-1].seconds:.1f} s")
    console.print(shown(found))
    works = sum(each.works for each in found)
    console.print(f"{works} of {len(found)} features work, ranks: {ranks}, {time.perf_counter() - began:.0f} s")
    return 0 if works == len(found) else 1


def shown(found: Sequence[Tried]) -> Table:
    """Return a table with a row for each feature. A failure like an earlier one refers to that one."""
    table, known = Table(*HEAD), dict[str, str]()
    for each in found:
        probe, says = each.probe, "" if each.works else "; ".join(filter(None, (each.why, each.probe.fix)))
        says = f"as {known[each.why]}" if each.why in known else says
        if each.why:
            known.setdefault(each.why, probe.name)
        figures = f"{each.seconds:.1f}", f"{each.error:.0e}", f"{probe.allowed:.0e}"
        table.add_row(probe.name, "works" if each.works else "FAILS", *figures, " ".join(probe.options), says)
    return table
