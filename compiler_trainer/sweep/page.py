"""A sweep as one page that needs no network: the best point, the effect of options, and the cost of each point."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plotly import graph_objects as go

from compiler_trainer.page import BLUE, ORANGE, figure_html, page, plots, tr
from compiler_trainer.page import table as in_html
from compiler_trainer.sweep.stored import Point
from compiler_trainer.sweep.table import MIB, SHOWN, as_text, figures, varying
from compiler_trainer.training import metrics

FILE = "sweep.html"
INSPECT = "inspect.html"  # of a point, made by `compiler-trainer inspect --html`
LOSSES = {"eval_loss": "validation loss", "loss": "training loss"}  # the first available one ranks the points
# column, heading, unit
BARS = (
    ("tokens_per_s", "Throughput, tokens/s", 1),
    ("peak_mem_bytes", "Peak memory of a rank, MiB", MIB),
    ("compile_s", "Compile time, s", 1),
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
BEST = {"symbol": "star", "size": 16, "color": ORANGE}
LOG_FROM = 8.0  # values that span this factor get a logarithmic axis
NAMED = 20  # the most lines in a legend
FRONT = "The line joins the points that no other beats in both, the Pareto front. Numbers are points."


def write(points: Sequence[Point], folder: Path) -> None:
    """Write `sweep.html` into the sweep's folder."""
    rows = in_html(table(points, folder))
    parts = (f"<p>{html.escape(summary(points))}</p>", plots(losses(points)), rows, plots(costs(points, folder)))
    title = f"Sweep: {folder.resolve().name}"
    (folder / FILE).write_text(page(title, "\n".join((*parts, errors(points)))), encoding="utf-8")


def summary(points: Sequence[Point]) -> str:
    """Return a text on the best point, the number of points, and the machine."""
    counts = {status: sum(p["status"] == status for p in points) for status in ("done", "failed", "running")}
    env, column = points[0]["environment"].get, score(points)
    ranks, commit = env("ranks"), str(env("commit"))
    machine = (
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {env('device')}, {env('cores')} cores, torch {env('torch')}"
    )
    counted = ", ".join(f"{n} {status}" for status, n in counts.items() if n) + f". {machine}, commit {commit[:10]}."
    if (winner := best(points)) is None:
        return counted
    value = winner["result"][column]
    return (
        f"Best: point {winner['point']} ({options(winner, varying(points))}), {LOSSES[column]} {value:.4f}. {counted}"
    )


def score(points: Sequence[Point]) -> str:
    """Return the column that ranks points: the validation loss, or the training loss if none was measured."""
    return next((column for column in LOSSES if with_values(points, column)), "loss")


def ranked(points: Sequence[Point]) -> list[Point]:
    """Return the points by loss, lowest first; then points without one, by number."""
    column = score(points)
    measured = sorted(with_values(points, column), key=lambda p: p["result"][column])
    return measured + [p for p in points if p not in measured]


def best(points: Sequence[Point]) -> Point | None:
    """Return the point of the lowest loss; None if no point has one."""
    measured = with_values(points, score(points))
    return ranked(measured)[0] if measured else None


# ---- effects of options -------------------------------------------------------------------------------


def losses(points: Sequence[Point]) -> Iterator[str]:
    """Yield plots of the final losses over the varied options, the validation loss first."""
    names = varying(points)
    for column, heading in LOSSES.items():
        if finished := with_values(points, column):
            caption = "The star marks the best point." if column == score(points) else ""
            yield figure_html(
                over_options(finished, column, names), f"{heading} at the end, nats per token".capitalize(), caption
            )


def over_options(all_points: Sequence[Point], column: str, names: Sequence[str]) -> go.Figure:
    """Return a plot of a loss over the option with most values, a line for each setting of the others."""
    plot = go.Figure()
    first = max(names, key=lambda n: spread(all_points, n), default=None)
    positions: dict[int, Any] = {p["point"]: value(p, first) if first else str(p["point"]) for p in all_points}
    numeric = all(isinstance(x, int | float) and not isinstance(x, bool) for x in positions.values())
    positions = positions if numeric else {n: html.escape(as_text(x) or "", quote=False) for n, x in positions.items()}
    lines: dict[str, list[Point]] = {}
    for p in sorted(all_points, key=lambda p: positions[p["point"]]) if numeric else all_points:
        lines.setdefault(options(p, [n for n in names if n != first]), []).append(p)
    for number, (name, points) in enumerate(merged(lines, column, first).items()):
        line, mark = {"dash": DASHES[number % len(DASHES)]}, {"symbol": MARKS[number % len(MARKS)], "size": 8}
        style = {"mode": "lines+markers", "line": line, "marker": mark, "name": html.escape(name, quote=False)}
        plot.add_trace(spots(points, positions, column, names).update(style))
    if (winner := best(all_points)) is not None and score(all_points) == column:
        plot.add_trace(spots([winner], positions, column, names).update(mode="markers", marker=BEST, showlegend=False))
    plot.update_xaxes(title=html.escape(short(first, names) if first else "point", quote=False))
    plot.update_xaxes(axis(list(positions.values())) if numeric else {"type": "category"})
    return plot.update_layout(height=320, showlegend=len(lines) > 1 and len(lines) <= NAMED)


def merged(lines: dict[str, list[Point]], column: str, first: str | None) -> dict[str, list[Point]]:
    """Return lines without those that lie on another one, whose name then has both."""
    names: dict[Any, list[str]] = {}
    for name, points in lines.items():
        course = tuple((as_text(value(p, first)) if first else "", p["result"][column]) for p in points)
        names.setdefault(course, []).append(name)
    return {" = ".join(same): lines[same[0]] for same in names.values()}


def spots(points: Sequence[Point], positions: dict[int, Any], column: str, names: Sequence[str]) -> go.Scatter:
    """Return points at their positions on the x axis."""
    heights, hovertexts = [p["result"][column] for p in points], [label(p, names) for p in points]
    return go.Scatter(x=[positions[p["point"]] for p in points], y=heights, hovertext=hovertexts)


def axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis with a tick for each value, if they are few; logarithmic if they span a large factor."""
    marked = sorted(set(values))
    log = marked[0] > 0 and marked[-1] / marked[0] >= LOG_FROM
    ticks = {"tickvals": marked, "ticktext": [f"{v:g}" for v in marked]} if len(marked) <= 7 else {}
    return {"type": "log" if log else "linear", **ticks}


def spread(points: Sequence[Point], name: str) -> tuple[bool, int]:
    """Return a key that sorts options by whether they are numbers, then by their number of values."""
    values = [value(p, name) for p in points]
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return is_number, len({as_text(v) for v in values})


def value(point: Point, name: str) -> Any:
    """Return the value of an option at a point, from its overrides or its configuration."""
    return point["overrides"].get(name, point.get("config", {}).get(name))


# ---- costs of points ----------------------------------------------------------------------------------


def costs(points: Sequence[Point], folder: Path) -> Iterator[str]:
    """Yield plots of loss by step, throughput, memory, compilation, and throughput against memory."""
    names = varying(points)
    if lines := loss_curves(points, folder, names):
        plot = go.Figure(lines).update_xaxes(title="step").update_yaxes(title="nats per token")
        plot.update_layout(height=380, showlegend=len(lines) <= NAMED)
        yield figure_html(plot, "Training loss by step", wide=True)
    for column, heading, unit in BARS:
        if with_values(points, column):
            yield figure_html(bars(points, column, unit), heading)
    if with_values(points, "peak_mem_bytes", "tokens_per_s"):
        plot = go.Figure(memory_against_throughput(points, names)).update_layout(height=340)
        plot.update_xaxes(title="peak memory of a rank, MiB").update_yaxes(title="tokens/s")
        yield figure_html(plot, "Throughput against memory.", FRONT, wide=True)


def bars(points: Sequence[Point], column: str, unit: int) -> go.Figure:
    """Return a plot with a bar for each point; the best point has another colour."""
    names, finished, winner = varying(points), with_values(points, column), best(points)
    labels = [label(p, names) for p in finished]
    colours = [ORANGE if p is winner else BLUE for p in finished]
    heights = [p["result"][column] / unit for p in finished]
    plot = go.Figure(go.Bar(y=labels, x=heights, orientation="h", hovertext=labels, marker_color=colours))
    plot.update_yaxes(type="category", autorange="reversed")
    return plot.update_layout(height=80 + 24 * len(finished), bargap=0.3, showlegend=False)


def label(point: Point, names: Sequence[str]) -> str:
    """Return the distinguishing options of a point: `3: tp=2 remat.policy=full`, with names as short as possible.

    The text is escaped, because plots interpret tags and links.
    """
    return html.escape(f"{point['point']}: {options(point, names)}", quote=False)


def options(point: Point, names: Sequence[str]) -> str:
    """Return the values that a point sets for these options: `tp=2 remat.policy=full`."""
    settings = (f"{short(n, names)}={as_text(point['overrides'][n])}" for n in names if n in point["overrides"])
    return " ".join(settings)


def short(name: str, names: Sequence[str]) -> str:
    """Return the shortest unambiguous ending of an option's name."""
    parts = name.split(".")
    ends = (".".join(parts[-n:]) for n in range(1, len(parts)))
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in names) == 1), name)


def with_values(points: Sequence[Point], *columns: str) -> list[Point]:
    """Return the finished points that have values in these columns."""
    finished = (p for p in points if p["status"] == "done")
    return [p for p in finished if all(p["result"].get(column) is not None for column in columns)]


def loss_curves(points: Sequence[Point], folder: Path, names: Sequence[str]) -> list[go.Scatter]:
    """Return the training loss of each point over its steps so far."""
    lines = []
    for number, p in enumerate(points):
        path = folder / str(p["point"]) / metrics.FILE
        if path.exists() and (records := metrics.read(path)):
            steps, losses = [r["step"] for r in records], [r.get("loss") for r in records]
            mark = {"symbol": MARKS[number % len(MARKS)], "maxdisplayed": 20}
            line = {"dash": DASHES[number % len(DASHES)]}
            name = label(p, names)
            style = {"mode": "lines+markers", "line": line, "marker": mark, "hovertext": name}
            lines.append(go.Scatter(x=steps, y=losses, name=name, **style))
    return lines


def memory_against_throughput(points: Sequence[Point], names: Sequence[str]) -> list[go.Scatter]:
    """Return all points, and the Pareto front of memory and throughput."""
    finished = with_values(points, "peak_mem_bytes", "tokens_per_s")

    def scatter(some: Sequence[Point], **how: Any) -> go.Scatter:
        memory = [p["result"]["peak_mem_bytes"] / MIB for p in some]
        speed = [p["result"]["tokens_per_s"] for p in some]
        return go.Scatter(x=memory, y=speed, hovertext=[label(p, names) for p in some], showlegend=False, **how)

    numbers = {"text": [str(p["point"]) for p in finished], "textposition": "top center"}
    best = pareto_front(finished)
    return [
        scatter(best, mode="lines", line={"color": ORANGE, "shape": "hv"}),
        scatter(finished, mode="markers+text", marker={"color": BLUE, "size": 9}, **numbers),
    ]


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points for which no other is faster in as little memory, by memory."""
    by_memory = sorted(points, key=lambda p: (p["result"]["peak_mem_bytes"], -p["result"]["tokens_per_s"]))
    front: list[Point] = []
    for p in by_memory:
        if not front or p["result"]["tokens_per_s"] > front[-1]["result"]["tokens_per_s"]:
            front.append(p)
    return front


def table(points: Sequence[Point], folder: Path) -> list[str]:
    """Return the rows of the console's table as HTML, the best point first; a point links to its page or its folder."""
    names, winner = varying(points), best(points)
    headings = ("point", *names, "status", *(heading for _, heading, _ in SHOWN))
    lines = [tr("th", headings)]
    for p in ranked(points):
        values = (as_text(p["overrides"].get(n)) for n in names)
        name, kind = (f"{p['point']} (best)", "best") if p is winner else (str(p["point"]), p["status"])
        link = f"{p['point']}/{INSPECT}" if (folder / str(p["point"]) / INSPECT).exists() else f"{p['point']}/"
        lines.append(tr("td", (name, *values, p["status"], *figures(p)), kind, link=link))
    return lines


def errors(points: Sequence[Point]) -> str:
    """Return the errors of failed points, with folded tracebacks."""
    return "\n".join(
        f"<details><summary>point {p['point']}: {html.escape(p['error'])}</summary>"
        f"<pre>{html.escape(p['traceback'])}</pre></details>"
        for p in points
        if "error" in p
    )
