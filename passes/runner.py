"""Run passes in order: time each, verify what it leaves, and show every stage to an observer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from passes import ir
from passes.accounting import Accounting, account
from passes.printer import print_program
from passes.sweep import sweep
from passes.torch_private import trace_artifact
from passes.verify import verify_spec


@dataclass(frozen=True)
class PassRecord:
    """One pass of one program: how long it took, what it did, and what the program it left will cost."""

    program: str
    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    report: ir.Report
    accounting: Accounting

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


Observer = Callable[[ir.Program, PassRecord], None]


def check_order(passes: Sequence[ir.Pass], facts: Iterable[str]) -> None:
    """Raises ValueError naming the first pass whose requirements nothing before it establishes."""
    known = set(facts)
    for step in passes:
        if missing := step.requires - known:
            raise ValueError(f"pass {step.name!r} requires {', '.join(sorted(missing))}, which no pass before it gives")
        known |= step.establishes


def run_passes(name: str, passes: Sequence[ir.Pass], program: ir.Program, ctx: ir.Context, *, verify: str = "spec",
               observe: Observer | None = None) -> tuple[ir.Program, list[PassRecord]]:
    """The program after all passes, and a record of each; raises CompileError where a pass or its result is wrong."""
    check_order(passes, program.facts)
    records, answers = [], {}
    for step in passes:
        before, started = sum(1 for _ in program.graph.nodes), time.perf_counter()
        program, report = step(program, ctx)
        seconds = time.perf_counter() - started
        swept = sweep(program, ctx, answers) if verify == "off" else verify_spec(program, ctx, pass_name=step.name, answers=answers)
        after = sum(1 for _ in program.graph.nodes)
        records.append(PassRecord(name, step.name, seconds, before, after, report, account(program, swept)))
        if observe is not None:
            observe(program, records[-1])
    return program, records


class Dumper:
    """Writes every stage as `NN_<program>_<pass>.txt` and `.json` into a folder, and as artifacts to TORCH_TRACE."""

    def __init__(self, folder: Path):
        self.folder, self.count = Path(folder), 0

    def __call__(self, program: ir.Program, record: PassRecord) -> None:
        stage = f"{self.count:02d}_{record.program}_{record.name}"
        self.count += 1
        text, report = print_program(program), json.dumps(record.as_dict(), indent=1)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{stage}.txt").write_text(text)
        (self.folder / f"{stage}.json").write_text(report)
        trace_artifact(stage, "string", lambda: text)
