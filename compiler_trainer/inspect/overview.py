"""Totals of each stage of a run: nodes, collectives, casts, masks, FLOPs, memory."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_trainer.inspect.dumps import Run, Stage


@dataclass(frozen=True)
class Totals:
    """The sums over a stage; bytes and FLOPs are of one rank once the program is local."""

    nodes_before: int
    nodes_after: int
    collectives: int
    sent_bytes: int
    casts: int | None  # None in a run of an earlier version
    masks: int
    flops: int
    recomputed_flops: int
    peak_bytes: int


def totals(stage: Stage) -> Totals:
    """Return the sums of a stage; casts are operators that change dtypes, masks those that its pass inserted."""
    costs = stage.report["accounting"]
    return Totals(
        stage.report["nodes_before"],
        stage.report["nodes_after"],
        sum(t["calls"] for t in costs["traffic"]),
        sum(t["sent_bytes"] for t in costs["traffic"]),
        stage.casts,
        stage.report["report"]["counts"].get("masks", 0),
        sum(costs["flops"].values()),
        costs["recomputed_flops"],
        costs["peak_bytes"],
    )


def seconds_of(run: Run, stage: Stage) -> float | None:
    """Return the seconds of the pass; those of capture are reported for the whole run."""
    key = "capture" if stage.name == "capture" else f"{stage.program}.{stage.name}"
    return run.report.get("seconds", {}).get(key)
