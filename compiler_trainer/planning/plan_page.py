"""The page of a plan, which needs no network: the best setting, its time, and why the others are slower."""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from plotly import graph_objects as go

from compiler_trainer.config.device import cluster_of
from compiler_trainer.config.errors import UserError
from compiler_trainer.page import BLUE, COLOURS, ORANGE, figure_html, page, plots, table, tr
from compiler_trainer.planning import answer, compiled
from compiler_trainer.planning.answer import Varied
from compiler_trainer.planning.dry import error_bar
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.search import GIB, Plan, room
from passes.cost.predict import predict
from passes.cost.timeline import COMPUTE, Timeline

FILE = "plan.html"
GREY = "#888a85"
MORE = "more computing"
KINDS = dict(zip((MORE, "fsdp", "tp", "cp", "ep", "dp_replicate", "pp"), COLOURS))
FRONT = "Nothing on the Pareto front is beaten in both speed and memory. The dotted line is the memory of the GPU."
LOST = "Computing more than the setting that computes least, and waiting; without both, a step takes {least:,.0f} ms."
FAINT = 300  # closed forms that are drawn
SHOWN_MEMORY, SHOWN_SPEED = 2.0, 0.3  # of the memory that there is, at most, and of the best's throughput, at least
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def write(plan: Plan, folder: Path) -> None:
    """Write `plan.html` into a run folder."""
    layers, step = compiled.for_timeline(plan.request.cfg, plan.best.candidate)
    cluster = cluster_of(plan.request.cfg.cluster)
    timelines = {name: predict(*captured, cluster).timeline for name, captured in step.programs.items()}
    layers_note = (
        "" if layers in (None, getattr(plan.request.cfg.model, "n_layers", None)) else f" of its first {layers} layers"
    )
    shown = plan.ranked[: answer.SHOWN]
    lost = LOST.format(least=1e3 * min(estimate.compute_s for estimate in shown))
    parts = (
        f"<p>{html.escape(answer.job(plan))}. {html.escape(answer.setting_counts(plan))}.</p>",
        f"<p>{html.escape(error_bar(plan.request.cfg))}</p>",
        table(ranking(plan)),
        plots(
            (
                figure_html(memory_against_throughput(plan), "Predicted throughput against memory.", FRONT),
                figure_html(steps(shown), "Predicted loss of time in a step, ms.", lost),
            )
        ),
        f"<h2>The predicted timeline of the best{layers_note}</h2>",
        "<p>Kernels on the compute stream, collectives of each axis; a gap in computing is a wait.</p>",
        *(figure_html(gantt(name, timeline)) for name, timeline in timelines.items()),
        "<h2>Why the others are slower</h2><p>The best setting of each other mesh.</p>",
        table(reasons(plan), "words"),
        left_out(plan),
    )
    (folder / FILE).write_text(page(f"Plan: {answer.title(plan)}", "\n".join(parts)), encoding="utf-8")


def ranking(plan: Plan) -> list[str]:
    """Return the console's table as HTML rows, with the settings that do not fit at the end."""
    lines = [tr("th", answer.HEADINGS)]
    lines += [tr("td", answer.row(plan, n, estimate)) for n, estimate in enumerate(plan.ranked[: answer.SHOWN], 1)]
    return lines + [tr("td", answer.row(plan, "too large", estimate), "failed") for estimate in plan.too_large]


def reasons(plan: Plan) -> list[str]:
    """Return a row for the best setting of each other mesh, with the reason why it is not the best."""
    lines = [tr("th", ("mesh", "microbatches", "recomputation", "tokens/s/GPU", "estimated from", "why not"))]
    for estimate, reason in answer.others_with_reasons(plan):
        candidate, source = estimate.candidate, "graphs" if estimate.is_compiled else "closed form"
        speed = f"{plan.tokens_per_s(estimate):,.0f}"
        cells = (candidate.axes(), str(candidate.microbatches), candidate.recomputes(), speed, source, reason)
        lines.append(tr("td", cells))
    return lines


def left_out(plan: Plan) -> str:
    """Return paragraphs on settings that were refused or left out from the start."""
    lines = [f"{count} meshes: {reason}" for reason, count in plan.left.items()]
    lines += [f"{c.axes()}, {c.recomputes()}: refused, {cause}" for c, cause in plan.refused.items()]
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


# ---- plots --------------------------------------------------------------------------------------------


def memory_against_throughput(plan: Plan) -> go.Figure:
    """Return a plot of settings by memory and throughput, compiled ones and closed forms."""
    near = SHOWN_MEMORY * room(plan.request)
    slowest = SHOWN_SPEED * plan.tokens_per_s(plan.best)
    forms = [e for e in best_of_each(plan) if e.bytes < near and plan.tokens_per_s(e) > slowest]
    points = (
        scatter(plan, forms, "closed form", color=GREY, size=5, opacity=0.5),
        scatter(plan, plan.ranked, "compiled", color=BLUE, size=10),
        scatter(plan, plan.too_large, "compiled, too large", color=BLUE, size=10, symbol="circle-open"),
        pareto_front(plan),
    )
    plot = go.Figure(points).add_vline(room(plan.request) / GIB, line_dash="dot", line_color=GREY)
    plot.update_xaxes(title="peak memory of a GPU, GiB").update_yaxes(title="tokens/s/GPU")
    return plot.update_layout(height=460)


def steps(estimates: Sequence[Estimate]) -> go.Figure:
    """Return a bar chart of the time that each setting loses in a step."""
    plot = go.Figure(bars(estimates)).update_xaxes(title="ms").update_yaxes(autorange="reversed", type="category")
    return plot.update_layout(height=460, barmode="stack")


def best_of_each(plan: Plan) -> list[Estimate]:
    """Return the fastest closed form of each mesh and recomputation."""
    fastest: dict[tuple[object, ...], Estimate] = {}
    for form in plan.forms:
        fastest.setdefault((form.candidate.mesh, form.candidate.recompute), form)
    return list(fastest.values())[:FAINT]


def scatter(plan: Plan, estimates: Sequence[Estimate], name: str, **marker: object) -> go.Scatter:
    """Return settings as points."""
    memory, speed = [e.bytes / GIB for e in estimates], [plan.tokens_per_s(e) for e in estimates]
    return go.Scatter(
        x=memory, y=speed, mode="markers", name=name, marker=marker, hovertext=[label(e) for e in estimates]
    )


def pareto_front(plan: Plan) -> go.Scatter:
    """Return the Pareto front of compiled settings."""
    best: list[Estimate] = []
    for estimate in sorted((*plan.ranked, *plan.too_large), key=lambda e: (e.bytes, e.step_s)):
        if not best or estimate.step_s < best[-1].step_s:
            best.append(estimate)
    memory, speed = [e.bytes / GIB for e in best], [plan.tokens_per_s(e) for e in best]
    line = {"color": ORANGE, "shape": "hv"}
    return go.Scatter(x=memory, y=speed, mode="lines", name="Pareto front", line=line)


def label(estimate: Estimate) -> str:
    """Return a setting in one line."""
    candidate = estimate.candidate
    method = f", {candidate.method}" if candidate.mesh.cp > 1 else ""
    return f"{candidate.axes()}, {candidate.microbatches} microbatches, {candidate.recomputes()}{method}"


def bars(estimates: Sequence[Estimate]) -> list[go.Bar]:
    """Return bars of milliseconds lost: computing more than the least of all, and waiting, by axis or for launches."""
    names = [f"{n}: {e.candidate.axes()}" for n, e in enumerate(estimates, 1)]
    least = min(e.compute_s for e in estimates)
    parts = [{MORE: e.compute_s - least, **answer.waits_by_name(e.exposed_s)} for e in estimates]
    for part, estimate in zip(parts, estimates):
        part["launches"] = max(0.0, estimate.step_s - least - sum(part.values()))
    return [
        go.Bar(
            y=names,
            x=[1e3 * part.get(kind, 0.0) for part in parts],
            orientation="h",
            name=answer.NAMES.get(kind, kind),
            marker_color=KINDS.get(kind, GREY),
            hovertext=[label(e) for e in estimates],
        )
        for kind in dict.fromkeys((*KINDS, *itertools.chain(*parts)))
        if any(part.get(kind) for part in parts)
    ]


def gantt(name: str, timeline: Timeline) -> go.Figure:
    """Return a chart of a program's kernels and collectives, each on its stream."""
    streams = list(dict.fromkeys([COMPUTE, *(str(span.stream) for span in timeline.spans.values())]))
    plot = go.Figure()
    for stream in streams:
        spans = {node: span for node, span in timeline.spans.items() if span.stream == stream}
        colour = BLUE if stream == COMPUTE else KINDS.get(answer.AXIS.get(stream, stream), GREY)
        plot.add_trace(
            go.Bar(
                y=[stream] * len(spans),
                base=[1e3 * span.start for span in spans.values()],
                x=[1e3 * (span.end - span.start) for span in spans.values()],
                orientation="h",
                name=stream,
                marker={"color": colour, "line": {"width": 0}},
                hovertext=list(spans),
                showlegend=False,
            )
        )
    plot.update_xaxes(title=f"ms of the program {name}")
    plot.update_yaxes(autorange="reversed")
    return plot.update_layout(height=90 + 45 * len(streams), bargap=0.3)


# ---- several plans ------------------------------------------------------------------------------------


def write_varied(varied: Sequence[Varied], folder: Path) -> None:
    """Write `plan.html` of plans for several values into a run folder."""
    lines = [tr("th", (*varied[0].values, *answer.HEADINGS[1:]))]
    for number, variant in enumerate(varied):
        lines.append(tr("td", variant.row(), link="" if isinstance(variant.plan, UserError) else f"{number}/"))
    drawings = (figure_html(plot, caption) for caption, plot in over_values(varied).items())
    body, title = f"{plots(drawings)}{table(lines)}", answer.title(answer.found_plans(varied)[0][1])
    (folder / FILE).write_text(page(f"Plans: {title}", body), encoding="utf-8")


def over_values(varied: Sequence[Varied]) -> dict[str, go.Figure]:
    """Return plots of throughput and memory of the best setting over the first option, a line for each other value."""
    first, *others = varied[0].values
    lines: dict[str, list[tuple[dict[str, object], Plan]]] = {}
    for values, plan in answer.found_plans(varied):
        lines.setdefault(other_values(values, others), []).append((values, plan))
    speed, memory = go.Figure(), go.Figure()
    for number, (name, points) in enumerate(lines.items()):
        line = {"dash": DASHES[number % len(DASHES)], "color": COLOURS[number % len(COLOURS)]}
        x, hovertexts = [values[first] for values, _ in points], [label(plan.best) for _, plan in points]
        trace = {"x": x, "hovertext": hovertexts, "name": name, "mode": "lines+markers", "line": line}
        speed.add_scatter(y=[plan.tokens_per_s(plan.best) for _, plan in points], **trace)
        memory.add_scatter(y=[plan.best.bytes / GIB for _, plan in points], **trace)
    for plot in (speed, memory):
        plot.update_xaxes(title=first).update_yaxes(rangemode="tozero")
        plot.update_layout(height=380, showlegend=len(lines) > 1)
    return {"Throughput of the best, tokens/s/GPU": speed, "Its peak memory of a GPU, GiB": memory}


def other_values(values: Mapping[str, object], others: Sequence[str]) -> str:
    """Return the values of the options that are not on the x axis."""
    return ", ".join(f"{name}={values[name]}" for name in others) or "best"
