"""What a setting takes, read from the graphs that would run: compiled with few layers, and continued to all of them.

Time and memory of a rank are linear in the number of layers alike, once there are a few: collectives overlap with their
neighbours only, and the peak is at one place of the step. The places are followed one by one, so that it may move.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from compiler_trainer.config.clusters import cluster_of
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import ClusterConfig, Config, ModelConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.pipeline import FORWARD, Passes, build_pipeline
from compiler_trainer.planning import piped
from compiler_trainer.planning.dry import request_of, sent_bytes, stored_bytes
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.space import Candidate, depth_pattern, replaced
from compiler_trainer.step.exported import export_once
from compiler_trainer.step.given import Captured
from passes.check.runner import apply_pass
from passes.communication.batch_overlap import microbatches_in
from passes.cost.accounting import Ledger
from passes.cost.cluster import Cluster
from passes.cost.predict import Timeline, predict
from passes.program import ir
from passes.program.abstract_eval import abstract_eval
from passes.program.layer import Layer
from passes.program.stages import Stage

Figures = dict[tuple[str, ...], float]
FEW = (3, 4)  # layers, or (1, 2) periods of them: with two, none has neighbours on both sides
captures: dict[str, Captured] = {}  # by what they depend on, in this process, the one that was used last at the end
MOST_CAPTURES = 4  # few layers and one more, in two sizes of microbatches


def depths(cfg: Config) -> tuple[tuple[int, ...], int]:
    """(the numbers of layers to compile, all layers): all of them where there are few; none if options cannot say."""
    if not isinstance(cfg.model, ModelConfig):
        return (), 0
    first, period = depth_pattern(cfg.model)
    few = tuple(first + n * period for n in (FEW if period == 1 else (1, 2)))
    whole = cfg.model.n_layers
    return (few if whole > few[-1] and (whole - few[0]) % period == 0 else (whole,)), whole


def estimate(cfg: Config, candidate: Candidate, clusters: Sequence[ClusterConfig]) -> tuple[Estimate, ...]:
    """What a job takes in a setting on each cluster, from compiled programs; raises UserError where it is refused."""
    if candidate.mesh.pp > 1:
        return piped.estimates(cfg, candidate, clusters)
    cfg = candidate.applied(cfg)
    few, layers = depths(cfg)
    found = [figures(replaced(cfg, {"model": {"n_layers": n}}), clusters) for n in few] or [figures(cfg, clusters)]
    if len(few) < 2:
        return tuple(from_figures(candidate, known) for known in found[-1])
    lines = (continued(low, high, few[0], few[1], layers) for low, high in zip(*found))
    return tuple(from_figures(candidate, known) for known in lines)


def timeline(cfg: Config, candidate: Candidate) -> tuple[int | None, dict[str, Timeline]]:
    """(layers, the timeline of each program) of a setting, compiled with few layers where it has many."""
    if candidate.mesh.pp > 1:
        return piped.timelines(candidate.applied(cfg))
    few, layers = depths(cfg)
    if few and candidate.first:
        count = max(1, candidate.first.layers * few[-1] // layers)
        candidate = dataclasses.replace(candidate, first=candidate.first._replace(layers=count))
    cfg = candidate.applied(cfg)
    if few:
        cfg = replaced(cfg, {"model": {"n_layers": few[-1]}})
    cluster = cluster_of(cfg.cluster)
    return few[-1] if few else None, {name: predict(*p, cluster).timeline for name, p in programs_of(cfg).items()}


def continued(low: Figures, high: Figures, few: int, more: int, layers: int) -> Figures:
    """Figures of so many layers from those of few, on a line; what only one of them has has no line."""
    steps = (layers - more) / (more - few)
    return {key: max(0.0, value + steps * (value - low[key])) for key, value in high.items() if key in low}


def from_figures(candidate: Candidate, known: Figures) -> Estimate:
    """The figures of a step as an estimate: its peak is at the place where most is alive."""
    places: dict[tuple[str, ...], dict[str, float]] = {}
    sent: dict[str, dict[str, float]] = {}
    for (what, *rest), value in known.items():
        if what == "memory":
            places.setdefault(tuple(rest[:-1]), {})[rest[-1]] = value
        elif what == "sent":
            sent.setdefault(rest[0], {})[rest[1]] = value
    at = max(places, key=lambda place: sum(places[place].values()))
    exposed = {key[1]: value for key, value in known.items() if key[0] == "exposed" and value > 0}
    memory = {kind: size for kind, size in places[at].items() if size > 0}
    total = sum(memory.values())
    return Estimate(candidate, known["compute",], exposed, memory, known["step",], total, sent, " ".join(at))


def figures(cfg: Config, clusters: Sequence[ClusterConfig]) -> list[Figures]:
    """Seconds of a step, bytes sent and bytes alive by place, of a configuration as it is on each cluster."""
    programs = programs_of(cfg)
    alive = memory(programs)
    return [{**times(programs, cfg.train.microbatches, cluster_of(cluster)), **alive} for cluster in clusters]


def times(programs: Mapping[str, Captured], microbatches: int, cluster: Cluster) -> Figures:
    """Seconds of a step, computing and waiting, and bytes sent."""
    found = {name: predict(*captured, cluster) for name, captured in programs.items()}
    turns = microbatches // microbatches_in(program for program, _ in programs.values())
    runs = {name: turns if name == "accumulate" else 1 for name in found}
    known: Counter[tuple[str, ...]] = Counter()
    for name, prediction in found.items():
        timeline = prediction.timeline
        parts: Figures = {("step",): timeline.step_s, ("compute",): timeline.compute_s}
        parts |= {("exposed", axis): s for axis, s in timeline.exposed_s.items()}
        for key, seconds in parts.items():
            known[key] += runs[name] * seconds  # type: ignore[assignment]
    for axis, links in sent_bytes(found, runs).items():
        known.update({("sent", axis, link): size for link, size in links.items()})
    return dict(known)


def programs_of(cfg: Config) -> dict[str, Captured]:
    """The programs of a step as they are before they are cut into segments; raises UserError where a pass refuses.

    The model is captured once for settings that share the shapes of a microbatch. Nothing is verified: the run does so.
    """
    request = request_of(cfg, subject(cfg))
    pipeline = build_pipeline(request)
    if pipeline.is_cut:
        raise UserError("passes.accumulate.gather", "plans know gathers of each microbatch alone; set it to microbatch")
    rows = cfg.train.global_batch_size // cfg.train.microbatches
    key = repr((cfg.model, cfg.loss, rows, cfg.train.seq_len, cfg.train.dtype, cfg.passes.cast.param_dtype))
    if key not in captures:
        captures[key] = export_once(request, None)
    program, ctx = captures[key] = captures.pop(key)
    if len(captures) > MOST_CAPTURES:
        del captures[next(iter(captures))]
    try:
        on_mesh = Captured(dataclasses.replace(program, mesh=request.mesh.without("pp")), ctx)
        forward = through(pipeline[FORWARD].passes, on_mesh)
        return {name: through(passes, forward) for name, passes in pipeline.training().items()}
    except ir.Refused as error:
        raise UserError(error.pass_name, error.located) from error


def through(passes: Passes, given: Captured) -> Captured:
    """A program after some passes, up to where it would be cut."""
    program, ctx = given
    for step in passes:
        if step.gives is Stage.SEGMENTED:
            break
        program, _ = apply_pass(step, program, ctx)
    return Captured(program, ctx)


# ---- memory by place ----------------------------------------------------------------------------------


def memory(programs: Mapping[str, Captured]) -> Figures:
    """Most bytes alive at each place of a step, by kind: ("memory", program, phase, layer, kind)."""
    state = {name: stored_bytes(captured) for name, captured in programs.items()}
    everything = {key: size for own in state.values() for key, size in own.items()}
    found: Figures = {}
    for name, captured in programs.items():
        beside = sum(size for key, size in everything.items() if key not in state[name])
        for place, kinds in peaks(captured).items():
            alive = kinds | ({"state of other programs": beside} if beside else {})
            found |= {("memory", name, *place, kind): float(size) for kind, size in alive.items()}
    return found


def peaks(captured: Captured) -> dict[tuple[str, str], dict[str, int]]:
    """Bytes by kind where most is alive in each phase, within the first layer, the last one, and outside of layers."""
    program, ctx = captured
    ledger = Ledger(program, abstract_eval(program, ctx))
    nodes, size = list(program.graph.nodes), ledger.avals.storage_bytes
    change = [0] * (len(nodes) + 1)
    for life in ledger.all_lives:
        change[life.born] += life.times * size[life.storage]
        change[life.last + 1] -= life.times * size[life.storage]
    live = list(itertools.accumulate(change[:-1]))
    highest: dict[tuple[str, str], int] = {}
    for i, place in enumerate(places(program, nodes)):
        if place is not None and live[i] > live[highest.setdefault(place, i)]:
            highest[place] = i
    return {place: alive_at(ledger, at) for place, at in highest.items()}


def places(program: ir.Program, nodes: list[fx.Node]) -> list[tuple[str, str] | None]:
    """The phase and the layer of each node; None within layers that lie between the first and the last."""
    layer = {node: None if ir.phase(node) == "optimizer" else ir.layer(node) for node in program.calls()}
    order = list(dict.fromkeys(filter(None, layer.values())))
    names: dict[Layer | None, str | None] = {**dict.fromkeys(order), None: "outside of layers"}
    if order:
        names |= {order[0]: "first layer", order[-1]: "last layer"}
    found: list[tuple[str, str] | None] = []
    for node in nodes:
        name = names[layer.get(node)]
        found.append(None if name is None or node.op != "call_function" else (ir.phase(node), name))
    return found


def alive_at(ledger: Ledger, at: int) -> dict[str, int]:
    """Bytes alive at a node, by kind."""
    found: Counter[str] = Counter()
    for life in ledger.all_lives:
        if life.born <= at <= life.last:
            found[ledger.kinds[life.storage]] += life.times * ledger.avals.storage_bytes[life.storage]
    return dict(found)
