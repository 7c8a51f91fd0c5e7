"""Passes applied by hand, each with the verifier's check of placements."""

from __future__ import annotations

from collections.abc import Sequence

from passes.check.copies import check_copies
from passes.check.placements import check_placements
from passes.ir import ir


def apply(passes: Sequence[ir.Pass], program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
    """Return the program after the passes, and the last report; raise AssertionError with wrong placements."""
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
