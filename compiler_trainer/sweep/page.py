"""A sweep as one page that needs no network: plots of all points, and their table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly import graph_objects as go
from plotly.subplots import make_subplots

from compiler_trainer.page import BLUE, ORANGE, drawn, page, tr
from compiler_trainer.sweep.stored import Point
from compiler_trainer.sweep.table import MIB, SHOWN, as_text, figures, varying
from compiler_trainer.training import metrics

FILE = "sweep.html"
# column, heading, unit in which it is drawn
BARS = (
    ("tokens_per_s", "tokens/s", 1),
    ("peak_mem_bytes", "peak memory, MiB", MIB),
    ("compile_s", "compilation, s", 1),
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
ROW_PX, BELOW_PX = 24, 560  # of a bar, and all that is not bars


def write(found: Sequence[Point], folder: Path) -> None:
    """Write `sweep.html` into the sweep's folder."""
    parts = (f"<p>{html.escape(summary(found))}</p>", drawn(figure(found, folder)), f"<table>{table(found)}</table>")
    (folder / FILE).write_text(page(folder.resolve().name, "\n".join((*parts, errors(found)))), encoding="utf-8")


def summary(found: Sequence[Point]) -> str:
    """How many points there are, and what they ran on."""
    counts = {status: sum(p["status"] == status for p in found) for status in ("done", "failed", "running")}
    ran = found[0]["environment"].get
    where = f"{ran('ranks')} ranks, {ran('device')}, {ran('cores')} cores, torch {ran('torch')}, commit {ran('commit')}"
    return ", ".join(f"{n} {status}" for status, n in counts.items() if n) + f". {where}."


def figure(found: Sequence[Point], folder: Path) -> go.Figure:
    """Bars of throughput, memory and compilation, the loss by step, and throughput against memory."""
    titles = (*(heading for _, heading, _ in BARS), "loss by step", "throughput against memory")
    specs: list[list[Any]] = [[{}, {}, {}], [{"colspan": 2}, None, {}]]
    names, bars_px = varying(found), 120 + ROW_PX * len(found)
    share = bars_px / (bars_px + BELOW_PX)
    shape = {"row_heights": [share, 1 - share], "vertical_spacing": 90 / (bars_px + BELOW_PX)}
    plot = make_subplots(2, 3, subplot_titles=titles, specs=specs, horizontal_spacing=0.06, **shape)
    for at, (column, _, unit) in enumerate(BARS, 1):
        shown = with_values(found, column)
        heights = [p["result"][column] / unit for p in shown]
        labels = [label(p, names) for p in shown]
        bars = go.Bar(y=labels, x=heights, orientation="h", hovertext=labels)
        plot.add_trace(bars.update(marker_color=BLUE, showlegend=False), 1, at)
        plot.update_yaxes(type="category", autorange="reversed", automargin=True, row=1, col=at)
        plot.update_yaxes(showticklabels=at == 1, row=1, col=at)  # bars of one point are on one line
    for line in loss_curves(found, folder, names):
        plot.add_trace(line, 2, 1)
    for trace in memory_against_throughput(found, names):
        plot.add_trace(trace, 2, 3)
    plot.update_xaxes(title="step", row=2, col=1)
    plot.update_xaxes(title="peak memory, MiB", row=2, col=3)
    plot.update_yaxes(title="tokens/s", row=2, col=3)
    plot.update_yaxes(title="nats a token", row=2, col=1)
    legend = {"title": "loss of", "y": 1 - share, "yanchor": "top"}
    height = bars_px + BELOW_PX
    return plot.update_layout(height=height, template="plotly_white", legend=legend, margin={"l": 50, "r": 20})


def label(found: Point, names: Sequence[str]) -> str:
    """What sets a point apart: `3: tp=2 remat.policy=full`, names as short as they are clear.

    It is escaped: plots take tags, and links, in their texts.
    """
    given = (f"{short(n, names)}={as_text(found['overrides'][n])}" for n in names if n in found["overrides"])
    return html.escape(f"{found['point']}: {' '.join(given)}", quote=False)


def short(name: str, names: Sequence[str]) -> str:
    """The last part of an option's name, with those before it that others have otherwise."""
    parts = name.split(".")
    ends = (".".join(parts[-n:]) for n in range(1, len(parts)))
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in names) == 1), name)


def with_values(found: Sequence[Point], *columns: str) -> list[Point]:
    """The points that are done and have values in these columns."""
    done = (p for p in found if p["status"] == "done")
    return [p for p in done if all(p["result"].get(column) is not None for column in columns)]


def loss_curves(found: Sequence[Point], folder: Path, names: Sequence[str]) -> list[go.Scatter]:
    """The loss of each point over its steps, as far as it came."""
    lines = []
    for number, p in enumerate(found):
        path = folder / str(p["point"]) / metrics.FILE
        if path.exists() and (records := metrics.read(path)):
            steps, losses = [r["step"] for r in records], [r.get("loss") for r in records]
            mark = {"symbol": MARKS[number % len(MARKS)], "maxdisplayed": 20}
            line = {"dash": DASHES[number % len(DASHES)]}
            name = label(p, names)
            how = {"mode": "lines+markers", "line": line, "marker": mark, "hovertext": name}
            lines.append(go.Scatter(x=steps, y=losses, name=name, **how))
    return lines


def memory_against_throughput(found: Sequence[Point], names: Sequence[str]) -> list[go.Scatter]:
    """All points, and the front of those that no other beats in both."""
    shown = with_values(found, "peak_mem_bytes", "tokens_per_s")

    def scatter(some: Sequence[Point], **how: Any) -> go.Scatter:
        memory = [p["result"]["peak_mem_bytes"] / MIB for p in some]
        speed = [p["result"]["tokens_per_s"] for p in some]
        return go.Scatter(x=memory, y=speed, hovertext=[label(p, names) for p in some], showlegend=False, **how)

    numbers = {"text": [str(p["point"]) for p in shown], "textposition": "top center"}
    best = pareto_front(shown)
    return [
        scatter(best, mode="lines", line={"color": ORANGE, "shape": "hv"}),
        scatter(shown, mode="markers+text", marker={"color": BLUE, "size": 9}, **numbers),
    ]


def pareto_front(found: Sequence[Point]) -> list[Point]:
    """The points than which none is faster in as little memory, by memory."""
    by_memory = sorted(found, key=lambda p: (p["result"]["peak_mem_bytes"], -p["result"]["tokens_per_s"]))
    front: list[Point] = []
    for p in by_memory:
        if not front or p["result"]["tokens_per_s"] > front[-1]["result"]["tokens_per_s"]:
            front.append(p)
    return front


def table(found: Sequence[Point]) -> str:
    """The table of the console in HTML."""
    names = varying(found)
    headings = ("point", *names, "status", *(heading for _, heading, _ in SHOWN))
    lines = [tr("th", headings)]
    for p in found:
        given = (as_text(p["overrides"].get(n)) for n in names)
        lines.append(tr("td", (str(p["point"]), *given, p["status"], *figures(p)), p["status"], link=str(p["point"])))
    return "\n".join(lines)


def errors(found: Sequence[Point]) -> str:
    """Why points failed, with their tracebacks folded away."""
    return "\n".join(
        f"<details><summary>point {p['point']}: {html.escape(p['error'])}</summary>"
        f"<pre>{html.escape(p['traceback'])}</pre></details>"
        for p in found
        if "error" in p
    )
