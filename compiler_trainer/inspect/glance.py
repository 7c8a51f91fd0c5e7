"""The largest reshard, the memory alive at the peak, and the most exposed collective of a run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compiler_trainer.inspect.dumps import Node, Run, Stage

COMPUTE = "compute"  # the stream of computation in a predicted timeline; other streams are mesh axes
WAITS = ("wait_tensor", "arrive")


@dataclass(frozen=True)
class Stored:
    """Memory of a node's result: alive from line `born` to line `last` of the stage's text; `kind` is its content.

    A layer that stands for others has one row for itself, and one for the layers left out, `times` as large.
    """

    node: str
    born: int
    last: int
    bytes: int
    kind: str
    times: int


@dataclass(frozen=True)
class Sent:
    """One collective, which starts at `line`.

    Before its first result is waited for lie `between` operators of `between_flops` FLOPs, which may hide it.
    `exposed_ms` is the predicted time for which the computation waits for it, None without a prediction.
    """

    node: str
    kind: str
    axis: str
    sent_bytes: int
    line: int
    between: int
    between_flops: int
    exposed_ms: float | None


def reshards(run: Run) -> list[dict[str, Any]]:
    """Return changes of placement by bytes sent, largest first, each with the number of the `stage` that made it."""
    changes = [{**r, "stage": s.number} for s in run.program("forward") for r in s.report["report"].get("reshards", [])]
    return sorted(changes, key=lambda r: -r["sent_bytes"])


# ---- memory -------------------------------------------------------------------------------------------


def memory(stage: Stage) -> list[Stored]:
    """Return the storages of a program in the order of their creation; inputs live from the first line to the last."""
    first, end = memory_span(stage)
    stored = []
    for name, last, size, kind in stage.costs["storages"]:
        node, user = stage.by_name[name], stage.by_name.get(last)  # a returned value lives until "output"
        born = first if node.is_input else node.line
        times = next((count for count in stage.left_out if size == count * node.bytes), 1)
        stored.append(Stored(name, born, user.line if user and not node.is_input else end, size, kind, times))
    return stored


def content_text(stored: Stored, node: Node) -> str:
    """Return a description of memory: `f32[4, 8]`, for several layers `13 x f32[4, 8]`."""
    return node.value if stored.times == 1 else f"{stored.times} x {node.value}"


def memory_span(stage: Stage) -> tuple[int, int]:
    """Return the first and last line between which memory changes: the operators, plus one line for the outputs."""
    lines = [node.line for node in stage.by_name.values() if not node.is_input]
    return (lines[0], lines[-1] + 1) if lines else (0, 1)


def peak_line(stage: Stage) -> tuple[int, int]:
    """Return the line at which most bytes are alive, and the bytes."""
    change: dict[int, int] = defaultdict(int)
    for s in memory(stage):
        change[s.born] += s.bytes
        change[s.last + 1] -= s.bytes
    lines = sorted(change)
    live = list(itertools.accumulate(change[line] for line in lines))
    at = max(range(len(live)), key=live.__getitem__, default=0)
    return (lines[at], live[at]) if live else (0, 0)


def alive(stage: Stage, line: int) -> list[Stored]:
    """Return the memory alive at a line, largest first."""
    return sorted((s for s in memory(stage) if s.born <= line <= s.last), key=lambda s: (-s.bytes, s.born))


# ---- communication ------------------------------------------------------------------------------------


def collectives(run: Run, stage: Stage) -> list[Sent]:
    """Return the collectives of a program, the most exposed first."""
    exposed = exposed_ms(run, stage)
    flops = dict(map(tuple, stage.costs["flops"]))
    operators = [node for node in stage.by_name.values() if not node.is_input]
    index = {node.name: i for i, node in enumerate(operators)}
    worked = list(itertools.accumulate((flops.get(node.name, 0) for node in operators), initial=0))
    busy = list(itertools.accumulate((hides(node) for node in operators), initial=0))
    records = []
    for name, kind, axis, sent in stage.costs["collectives"]:
        start = index[name]
        wait = index.get(first_wait(stage, stage.by_name[name]), start)
        between = max(0, busy[wait] - busy[start + 1])
        between_flops = max(0, worked[wait] - worked[start + 1])
        ms = None if exposed is None else exposed.get(name, 0.0)
        records.append(Sent(name, kind, axis, sent, operators[start].line, between, between_flops, ms))
    return sorted(records, key=bareness)


def bareness(sent: Sent) -> tuple[float, bool, bool, int]:
    """Return a sort key, most exposed first: predicted time, then whether nothing could hide it, then bytes."""
    return -(sent.exposed_ms or 0.0), sent.between_flops > 0, sent.between > 0, -sent.sent_bytes


def hides(node: Node) -> bool:
    """Return True if a node is work that may hide communication: no collective, no wait, no part of a tuple."""
    return node.op not in (*WAITS, "getitem", "shift") and not node.op.startswith(("all_", "reduce_scatter"))


def first_wait(stage: Stage, node: Node) -> str:
    """Return the node that first waits for a collective, an empty string if none does."""
    for user in stage.users[node.name]:
        wait = user.name if user.op in WAITS else first_wait(stage, user) if user.op == "getitem" else ""
        if wait:
            return wait
    return ""


def exposed_ms(run: Run, stage: Stage) -> dict[str, float] | None:
    """Return the milliseconds for which the computation waits for each collective; None without a prediction."""
    events = [e for e in run.report.get("timeline", []) if e["program"] == stage.program]
    return dict(waits(events)) if events else None


def waits(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield each collective with the time for which the computation waits for it.

    A gap of the computation counts for the collective in it that ends first, then for the next.
    """
    computing = sorted((e["start_ms"], e["end_ms"]) for e in events if e["stream"] == COMPUTE)
    sending = sorted((e for e in events if e["stream"] != COMPUTE), key=lambda e: e["end_ms"])
    waiting_ms: dict[str, float] = defaultdict(float)
    free = [0.0, *(end for _, end in computing)]
    resumed = [*(start for start, _ in computing), max((e["end_ms"] for e in events), default=0.0)]
    at = 0
    for begin, end in zip(free, resumed, strict=True):
        while at < len(sending) and sending[at]["end_ms"] <= begin:
            at += 1
        for event in sending[at:]:
            if event["end_ms"] > end + 1e-6:
                break
            start = max(begin, event["start_ms"])
            if event["end_ms"] > start:
                waiting_ms[event["node"]] += event["end_ms"] - start
                begin = event["end_ms"]
    yield from waiting_ms.items()
