"""A run as one page: the sources in `page/` with the run's data, compressed; the page fetches nothing.

Texts are compressed one by one, so the page opens as fast for 100,000 nodes as for 100.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compiler_trainer.config.options import flat
from compiler_trainer.inspect import glance
from compiler_trainer.inspect.balance import balance
from compiler_trainer.inspect.course import course, plain
from compiler_trainer.inspect.dumps import Node, Run, Stage
from compiler_trainer.inspect.overview import seconds_of, totals
from compiler_trainer.inspect.words import COUNTS, PASSES
from passes.ir.mesh import SEQUENCE_AXIS

PAGE, LOOK = Path(__file__).parent / "page", Path(__file__).parents[1] / "look.css"
TABS = ("course.js", "graph.js", "diff.js", "memory.js", "communication.js", "pipeline.js", "experts.js", "sharding.js")
SCRIPTS = ("data.js", "list.js", *TABS, "page.js")
ALIVE_SHOWN, LINES_SHOWN = 3, 4  # the largest at the peak, on the first tab


def page(run: Run) -> str:
    """Return the page as text."""
    title = html.escape(f"{run.folder.name}: {run.config.get('model', {}).get('name', 'run')}")
    texts = (f'<script type="text/plain" id="text-{stage.number}">{pack(stage.text)}</script>' for stage in run.dumped)
    parts = {
        "title": title,
        "css": "".join(file.read_text(encoding="utf-8") for file in (LOOK, PAGE / "page.css")),
        "js": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "data": pack(json.dumps(summary(run), separators=(",", ":"))),
        "texts": "\n".join(texts),
    }
    text = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], text)


def pack(text: str) -> str:
    """Return text, compressed and in base64; equal texts give equal results."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def summary(run: Run) -> dict[str, Any]:
    """Return the data that the page needs before it unpacks any text."""
    last = run.trained[-1] if run.trained else run.stages[-1]
    mesh, order, folds = last.graph.mesh, last.graph.order, run.stages[0].graph.folds
    changes = list(reshards(run))
    experts = balance(run)
    return {
        "name": run.folder.name,
        "course": dataclasses.asdict(course(run)),
        "config": {name: plain(value) for name, value in flat(run.config).items()},
        "mesh": dict(mesh.sizes),
        "zigzag": [SEQUENCE_AXIS] if order.zigzag else [],
        "blocks": {SEQUENCE_AXIS: order.chunks} if order.table else {},
        "flattened": mesh.flattened,
        "folded": ", ".join(map(str, folds)),
        "stages": [stage_summary(run, stage) for stage in run.dumped],
        "programs": [program(run, stage) for stage in run.trained],
        "reshards": changes,
        "parameters": list(parameters(last)),
        "experts": dataclasses.asdict(experts) if experts else None,
        "pipeline": run.report.get("pipeline"),
        "stages_of_ranks": run.report.get("prediction", {}).get("pipeline"),
        "glance": {
            "reshard": largest(changes),
            "peak": peak(run.trained) if run.trained else None,
            "exposed": exposed(run),
        },
    }


def stage_summary(run: Run, stage: Stage) -> dict[str, Any]:
    """Return a row of the table of passes."""
    report = stage.report["report"]
    return {
        "number": stage.number,
        "title": title(stage),
        "does": PASSES.get(stage.name, ""),
        "seconds": seconds_of(run, stage),
        **dataclasses.asdict(totals(stage)),
        "counts": list(described_counts(report["counts"])),
        "notes": stage.notes,
    }


def title(stage: Stage) -> str:
    """Return the title of a stage, as `06 step: joint`."""
    return f"{stage.number:02} {stage.program}: {stage.name}"


def described_counts(counts: dict[str, int]) -> Iterator[tuple[str, int | None, int]]:
    """Yield the counts of a pass: (description, before or None, now); zeros are left out."""
    for name, count in counts.items():
        stem, _, when = name.rpartition("_")
        if when == "before" or not (count or counts.get(f"{stem}_before")):
            continue
        key, before = (stem, counts.get(f"{stem}_before")) if when == "after" else (name, None)
        yield COUNTS.get(key, key.replace("_", " ")), before, count


def program(run: Run, stage: Stage) -> dict[str, Any]:
    """Return the data of a finished program: memory in columns, its collectives, and its predicted timeline if any."""
    stored = glance.memory(stage)
    kinds = sorted({s.kind for s in stored})
    line, most = glance.peak_line(stage)
    events = [e for e in run.report.get("timeline", []) if e["program"] == stage.program]
    phases: dict[str, int] = {}
    for node in stage.by_name.values():
        if not node.is_input:
            phases.setdefault(node.phase, node.line)
    return {
        "number": stage.number,
        "program": stage.program,
        "title": title(stage),
        "span": glance.memory_span(stage),
        "peak": {"line": line, "bytes": most},
        "phases": list(phases.items()),
        "kinds": kinds,
        "memory": {
            **{key: [getattr(s, key) for s in stored] for key in ("node", "born", "last", "bytes", "times")},
            "kind": [kinds.index(s.kind) for s in stored],
        },
        "traffic": stage.report["accounting"]["traffic"],
        "collectives": [dataclasses.asdict(sent) for sent in glance.collectives(run, stage)],
        "timeline": [[e["node"], e["stream"], e["start_ms"], e["end_ms"]] for e in events],
    }


def reshards(run: Run) -> Iterator[dict[str, Any]]:
    """Yield reshards by bytes, each with the line that shows it: its collective, otherwise the value before it."""
    for change in glance.reshards(run):
        after, before = run.stages[change["stage"]], run.stages[change["stage"] - 1]
        origin = before.by_name.get(change["node"])
        sending = [after.by_name[name] for name in change["collectives"] if name in after.by_name]
        at = sending[0] if sending else after.by_name.get(change["node"])
        shown = (at, change["stage"]) if at else (origin, change["stage"] - 1)
        yield {
            **change,
            "module": origin.module if origin else "",
            "of": parameter_of(before, origin) if origin else "",
            "line": shown[0].line if shown[0] else 0,
            "stage": shown[1],
        }


def parameter_of(stage: Stage, node: Node) -> str:
    """Return the model's name of the parameter that a node is, or is computed from alone; otherwise an empty string."""
    while len(node.operands) == 1:
        node = stage.by_name[node.operands[0]]
    return node.label if node.op == "parameter" else ""


def parameters(stage: Stage) -> Iterator[dict[str, Any]]:
    """Yield every parameter as it is stored; bytes are per rank."""
    for node in stage.nodes:
        if node.op == "parameter":
            yield {"label": node.label, "value": node.value, "spec": node.spec, "bytes": node.bytes}


# ---- at a glance --------------------------------------------------------------------------------------


def largest(changes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the reshard that sends most, and how many others send as much."""
    if not changes or not changes[0]["sent_bytes"]:
        return None
    first = changes[0]
    return {**first, "as_large": sum(c["sent_bytes"] == first["sent_bytes"] for c in changes[1:])}


def peak(programs: list[Stage]) -> dict[str, Any]:
    """Return the highest peak of a step's programs, its line, and the largest memory alive there."""
    stage = max(programs, key=lambda s: s.report["accounting"]["peak_bytes"])
    line, most = glance.peak_line(stage)
    living = glance.alive(stage, line)
    kinds = Counter[str]()
    for s in living:
        kinds[s.kind] += s.bytes
    at = next((node for node in stage.by_name.values() if node.line == line), None)
    shown = [(s, stage.by_name[s.node]) for s in living[:ALIVE_SHOWN]]
    return {
        "stage": stage.number,
        "line": line,
        "bytes": most,
        "node": at.name if at else "output",
        "source": at.source if at else "",
        "module": at.module if at else "",
        "kinds": kinds.most_common(),
        "lines": by_line(stage, living)[:LINES_SHOWN],
        "alive": [
            {"line": n.line, **{key: getattr(s, key) for key in ("node", "bytes", "kind")}}
            | {"value": glance.content_text(s, n), "source": n.source, "module": n.module}
            for s, n in shown
        ],
    }


def by_line(stage: Stage, living: list[glance.Stored]) -> list[tuple[str, int, int]]:
    """Return (source line, bytes, count) of operators' results, largest first."""
    sizes, counts = Counter[str](), Counter[str]()
    for s in living:
        if source := stage.by_name[s.node].source:
            sizes[source] += s.bytes
            counts[source] += 1
    return [(source, n, counts[source]) for source, n in sizes.most_common()]


def exposed(run: Run) -> dict[str, Any] | None:
    """Return the collective with the longest predicted wait, or, without prediction, the largest that nothing hides."""
    pairs = [(stage, sent) for stage in run.trained for sent in glance.collectives(run, stage)]
    if not pairs:
        return None
    stage, first = min(pairs, key=lambda pair: glance.bareness(pair[1]))
    node = stage.by_name[first.node]
    return {
        **dataclasses.asdict(first),
        "stage": stage.number,
        "source": node.source,
        "module": node.module,
        "phase": node.phase,
        "count": len(pairs),
        "bare": sum(sent.between == 0 for _, sent in pairs),
        "all_ms": sum(sent.exposed_ms or 0.0 for _, sent in pairs),
    }
