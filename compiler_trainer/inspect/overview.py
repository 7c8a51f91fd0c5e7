"""What each stage of a run adds up to: nodes, collectives, casts, masks, FLOPs, memory."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_trainer.inspect.dumps import Run, Stage


@dataclass(frozen=True)
class Totals:
    """Sums over a stage; bytes and FLOPs are of one rank once the program is local."""

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
    """The sums of a stage; casts are operators that ask for a dtype, masks those that its pass put in."""
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
    """How long the pass took; capturing is reported of the whole run."""
    key = "capture" if stage.name == "capture" else f"{stage.program}.{stage.name}"
    return run.report.get("seconds", {}).get(key)
