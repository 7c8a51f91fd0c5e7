"""A run as tables: every pass, the work of one pass, the nodes that match a pattern."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compiler_trainer.config.errors import UserError
from compiler_trainer.inspect import glance
from compiler_trainer.inspect.balance import Balance, balance
from compiler_trainer.inspect.dumps import EARLIER, Body, Node, Run, Stage, matching
from compiler_trainer.inspect.overview import seconds_of, totals
from compiler_trainer.inspect.render import page

ROWS = 50  # of a table of nodes or reshards


def write_page(run: Run, file: Path, out: Console) -> None:
    """Write the page and print its path."""
    try:
        file.write_text(page(run), encoding="utf-8")
    except OSError as error:
        raise UserError(str(file), f"cannot be written: {error.strerror}; name another file") from error
    out.print(f"{file} ({size(file.stat().st_size)}): open it in a browser")


def chosen(run: Run, name: str | None) -> list[Stage]:
    """Return the stages of a pass, or the last of every program that trains; raise UserError naming the nearest."""
    if name is None:
        return run.trained or run.stages[-1:]
    matches = [
        s for s in run.dumped if name in (s.name, f"{s.program}_{s.name}", s.title, f"{s.number:02d}", s.program)
    ]
    if not matches:
        names = list(dict.fromkeys(s.name for s in run.dumped))
        nearest = difflib.get_close_matches(name, [*names, *(s.title for s in run.dumped)], 1, 0)
        raise UserError(
            "--pass", f"no pass is called {name!r}, did you mean {nearest[0]!r}? There are {', '.join(names)}"
        )
    return matches


# ---- tables -------------------------------------------------------------------------------------------


def show_run(run: Run, out: Console) -> None:
    """Print all passes, the communication, and the largest reshard, peak and exposed collective."""
    heads = "pass|>seconds|>nodes in|>out|>collectives|>sent|>casts|>masks|>FLOPs|>recomputed|>peak"
    passes = table("", heads)
    for stage in run.dumped:
        t, seconds = totals(stage), seconds_of(run, stage)
        time = "" if seconds is None else f"{seconds:.2f}"
        counts = (t.nodes_before, t.nodes_after, t.collectives)
        words = [stage.title, time, *(f"{n:,}" for n in counts), size(t.sent_bytes), count(t.casts), f"{t.masks or ''}"]
        passes.add_row(*words, flops(t.flops), flops(t.recomputed_flops), size(t.peak_bytes))
    out.print(passes)
    if (stored := run.report.get("program", {})).get("stored_as"):
        came = f"read from {stored['from']}" if stored.get("from") else "compiled by this start"
        out.print(f"program {stored['stored_as']}, {came}")
    if not run.stages[0].dump.exists():
        return say(out, "graphs", f"{run.stages[0].dump.name} {EARLIER}")
    if folds := run.stages[0].graph.folds:
        folded = ", ".join(map(str, folds))
        out.print(f"while passes ran, {folded}; costs are of all layers, nodes of the remaining ones")
    for name, bodies in run.bodies.items():
        out.print(bodies_table(name, bodies))
    for stage in run.trained:
        show_traffic(stage, out)
        show_glance(run, stage, out)
    if experts := balance(run):
        out.print(balance_table(experts))


def balance_table(experts: Balance) -> Table:
    """Return a table of how unevenly each layer used its experts, and of related metrics."""
    listing = table("experts: load of the busiest over the mean", "layer|>first|>most|>last")
    for layer, loads in experts.loads.items():
        listing.add_row(layer, *(f"{load:.2f}" for load in (loads[0], max(loads), loads[-1])))
    for name, values in experts.beside.items():
        listing.add_row(Text(name, "dim"), *(f"{value:.4g}" for value in (values[0], max(values), values[-1])))
    return listing


def bodies_table(program: str, bodies: list[Body]) -> Table:
    """Return a table of a program's compiled regions and their calls."""
    listing = table(f"bodies of {program}", "body|>called|>nodes|first")
    for body in bodies:
        listing.add_row(body.name, f"{body.called:,}", f"{body.nodes:,}", body.first)
    return listing


def show_glance(run: Run, stage: Stage, out: Console) -> None:
    """Print the largest reshard, the memory alive at the peak, and the most exposed collective."""
    if changes := [r for r in glance.reshards(run) if r["sent_bytes"]]:
        r = changes[0]
        details = f"{r['before']} -> {r['after']}: {r['reason']}"
        say(out, "largest reshard", f"%{r['node']} ({r['source']}), {size(r['sent_bytes'])} sent, {details}")
    line, most = glance.peak_line(stage)
    at = next((node for node in stage.by_name.values() if node.line == line), None)
    place = f"%{at.name} ({at.source})" if at else "the end"
    say(out, "peak", f"{size(most)} at {place}, line {line} of {stage.title}.txt; the largest values alive there:")
    living = table("", ">bytes|holds|node|value|source|module")
    for s in glance.alive(stage, line)[:8]:
        node = stage.by_name[s.node]
        living.add_row(size(s.bytes), s.kind, f"%{s.node}", glance.content_text(s, node), node.source, node.module)
    out.print(living)
    if sent := glance.collectives(run, stage):
        first, node = sent[0], stage.by_name[sent[0].node]
        exposure = (
            f"{first.between:,} operators until the wait for it"
            if first.exposed_ms is None
            else f"{first.exposed_ms:.3f} ms"
        )
        details = f"{first.kind} over {first.axis}, {size(first.sent_bytes)} sent"
        say(out, "most exposed", f"%{first.node} ({node.source}), {details}, {exposure}")


def show_pass(run: Run, stage: Stage, out: Console) -> None:
    """Print the counts, notes and reshards of one pass, and the communication of its graph."""
    seconds, t = seconds_of(run, stage), totals(stage)
    seconds_text = "" if seconds is None else f", {seconds:.2f} s"
    say(out, stage.title, f"{t.nodes_before:,} -> {t.nodes_after:,} nodes{seconds_text}, peak {size(t.peak_bytes)}")
    report = stage.report["report"]
    say(out, "counts", ", ".join(f"{key} {n:,}" for key, n in report["counts"].items()) or "none")
    if changes := sorted(report["reshards"], key=lambda r: -r["sent_bytes"]):
        listing = table(f"reshards, {len(changes):,} in all", ">sent|node|source|from|to|reason")
        for r in changes[:ROWS]:
            listing.add_row(size(r["sent_bytes"]), f"%{r['node']}", r["source"], r["before"], r["after"], r["reason"])
        out.print(listing)
    show_traffic(stage, out)
    resharded = {f"%{r['node']} ({r['source']}): {r['before']}" for r in changes}
    for note in stage.notes:
        if note.partition(" -> ")[0] not in resharded:
            out.print(Text(note), soft_wrap=True)


def show_nodes(stages: Iterable[Stage], name: str | None, module: str | None, line: str | None, out: Console) -> None:
    """Print the lines of the nodes that match all patterns; raise UserError if none does."""
    shown = 0
    for stage in stages:
        nodes: list[Node] = stage.nodes
        for pattern, key in ((name, lambda n: n.name), (module, lambda n: n.module)):
            nodes = list(matching(nodes, key, pattern)) if pattern else nodes
        nodes = [node for node in nodes if node.source == line] if line else nodes
        shown += len(nodes)
        say(out, stage.title, f"{len(nodes):,} of {len(stage.nodes):,} nodes")
        for node in nodes:
            out.print(Text(f"{node.line:6d}  {node.text}"), soft_wrap=True)
    if not shown:
        patterns = " ".join(f"{k} {v!r}" for k, v in (("--node", name), ("--module", module), ("--line", line)) if v)
        raise UserError(patterns, "matches no node; --pass names another stage, wildcards are * and ?")


def show_traffic(stage: Stage, out: Console) -> None:
    """Print the bytes that a rank sends, by kind and axis; nothing if it sends none."""
    if not stage.report["accounting"]["traffic"]:
        return
    sent = table("", "collective|axis|>calls|>bytes sent")
    for t in stage.report["accounting"]["traffic"]:
        sent.add_row(t["kind"], t["axis"], f"{t['calls']:,}", size(t["sent_bytes"]))
    out.print(sent)


def table(title: str, heads: str) -> Table:
    """Return an empty table with the columns `a|b`; a head that starts with > is aligned right."""
    listing = Table(title=title or None, title_justify="left", box=None, header_style="dim", pad_edge=False)
    for head in heads.split("|"):
        listing.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    return listing


def say(out: Console, label: str, words: Any) -> None:
    """Print a line with its label."""
    out.print(Text.assemble((f"{label}  ", "bold"), str(words)), soft_wrap=True)


def count(n: int | None) -> str:
    """Return a number as `1,024`, empty if it is None."""
    return "" if n is None else f"{n:,}"


def size(n: float) -> str:
    """Return bytes as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:,.0f} B" if unit == "B" else f"{n:.3g} {unit}" if n < 999.5 else f"{n:,.0f} {unit}"
        n /= 1024
    return f"{n:,.3g} TiB"


def flops(n: float) -> str:
    """Return FLOPs as `1.5 T`, empty for none."""
    for unit in ("", " K", " M", " G", " T", " P"):
        if n < 1000:
            return f"{n:.3g}{unit}" if n else ""
        n /= 1000
    return f"{n:.3g} E"
