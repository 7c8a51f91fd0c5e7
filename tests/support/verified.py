"""Passes applied by hand, with what the verifier reads of placements: a rewrite and its check in one."""

from __future__ import annotations

from collections.abc import Sequence

from passes.check.copies import check_copies
from passes.check.placements import check_placements
from passes.program import ir


def apply(passes: Sequence[ir.Pass], program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
    """The program after the passes, and the report of the last; raises AssertionError with what is placed wrongly."""
    report = ir.Report()
    for step in passes:
        before = program
        program, report = step(before, ctx)
        if step.name == "shard":
            wrong = [w for pair in ((before, program), *report.bodies) for w in check_placements(*pair)]
            assert not wrong, wrong
        if step.name == "joint":
            assert not list(check_copies(program)), list(check_copies(program))
    return program, report
