"""The cost of a setting, read from the compiled programs of a dry run; similar layers and stages are compiled once.

One layer stands for identical ones until the end (`passes/ir/folds.py`), and identical stages share programs
(`piped.py`). A model defined by options is captured with few layers; the layer that stands for others then also stands
for the missing ones. Settings between two recomputations are interpolated: time and bytes lie on the line between
them, and the peak is an upper bound, because it may be at another place of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from torch import nn

from compiler_trainer.config.schema import ClusterConfig, Config, ModelConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.pipeline import build_pipeline
from compiler_trainer.planning import piped
from compiler_trainer.planning.dry import FUSED, DryStep, flat_step, predict_step, request_of
from compiler_trainer.planning.estimate import Estimate
from compiler_trainer.planning.space import POLICIES, Candidate, First, depth_pattern, replace_nested
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import Captured, Reporter
from compiler_trainer.step.exported import Exported, export_once
from compiler_trainer.step.programs import compile_exported
from passes.ir import ir
from passes.ir.folds import Fold, Folding, number_in, renumbered
from passes.ir.layer import Layer

T = TypeVar("T", ir.Input, ir.Output)
MOST_CAPTURES = 4  # for example, of different microbatch sizes
DRAWN = 4  # layers of a timeline, or periods of layers
NUMBER = re.compile(r"\.\d+(?=\.|$)")
captures: dict[str, Captured] = {}  # of this process, by their inputs; the most recently used is the last


def estimate(cfg: Config, candidate: Candidate, clusters: Sequence[ClusterConfig]) -> tuple[Estimate, ...]:
    """Return the cost of a job in a setting on each cluster; raise UserError if a pass refuses the setting."""
    cfg = candidate.applied(cfg)
    step = compile_setting(cfg)
    return tuple(predicted(dataclasses.replace(cfg, cluster=cluster), candidate, step) for cluster in clusters)


def predicted(cfg: Config, candidate: Candidate, step: DryStep) -> Estimate:
    """Return the prediction of a dry run as an estimate; tensors that fusion never writes are subtracted."""
    report = predict_step(cfg, step)
    prediction, memory = report["prediction"], report["prediction"]["memory"]
    fused = {kind: size for kind, size in memory["beside"].items() if kind == FUSED and size}
    return Estimate(
        candidate,
        compute_s=prediction["compute_ms"] / 1e3,
        exposed_s={axis: ms / 1e3 for axis, ms in prediction["exposed_ms"].items() if ms > 0},
        memory=memory["kinds"] | fused,
        step_s=report["predicted"]["step_ms"] / 1e3,
        bytes=memory["bytes"] + sum(fused.values()),
        sent=prediction["sent_bytes"],
        place=f"{memory['program']} {memory['node']}",
    )


def compile_setting(cfg: Config) -> DryStep:
    """Return the programs of a job; raise UserError if a pass refuses it. Nothing is verified: the run does so."""
    cfg = replace_nested(cfg, {"passes": {"verify": "none"}, "run": {"dump_graphs": False}})
    if few := piped.few_stages(cfg):
        return piped.repeat_stages(cfg, few, compile_layers(few.cfg)) or compile_layers(cfg)
    return compile_layers(cfg)


def compile_layers(cfg: Config) -> DryStep:
    """Return the programs of a job; settings with the same microbatch shapes share one capture of the model."""
    trained = subject(cfg)
    request, report = request_of(cfg, trained), Reporter()
    pipeline = build_pipeline(request)
    exported = report.time("capture", lambda: Exported(captured(cfg, request, pipeline.folding)))
    compiled = compile_exported(request, pipeline, exported, report, None, lambda what: None, brief=True)
    return flat_step(cfg, trained, request, compiled)


def captured(cfg: Config, request: CompileRequest, folding: Folding | None) -> Captured:
    """Return the model's graph on the mesh of a request, from the captures of this process if it is there."""
    depths = None if folding is None else dataclasses.astuple(dataclasses.replace(folding, alike=None))  # type: ignore
    train, passes = cfg.train, cfg.passes
    shapes = {name: (value.shape, value.dtype) for name, value in request.batch.items()}
    patterns = passes.cast, passes.shard.plan, passes.remat.layers, passes.remat.modules, cfg.optim.groups
    is_one_rank = request.mesh.without("pp").world_size == 1
    key = repr((cfg.model, cfg.loss, train.dtype, train.seed, shapes, patterns, depths, is_one_rank))
    if key not in captures:
        captures[key] = export_few(cfg, request, folding)
    program, ctx = captures[key] = captures.pop(key)
    if len(captures) > MOST_CAPTURES:
        del captures[next(iter(captures))]
    return Captured(dataclasses.replace(program, mesh=request.mesh.without("pp")), ctx)


def export_few(cfg: Config, request: CompileRequest, folding: Folding | None) -> Captured:
    """Return the model's folded graph, captured with few layers if possible."""
    count = few_layers(cfg, request, folding)
    if count is None:
        return export_once(request, folding)
    small = subject(replace_nested(cfg, {"model": {"n_layers": count}}))
    program, ctx = export_once(dataclasses.replace(request, model=small.module, loss_fn=small.loss), folding)
    if len(program.folds) != 1:
        return export_once(request, folding)
    return Captured(with_more_layers(program, program.folds[0], cfg.model.n_layers - count), ctx)  # type: ignore[union-attr]


def with_more_layers(program: ir.Program, fold: Fold, missing: int) -> ir.Program:
    """Return a program whose folded layer stands for `missing` more layers; layers after it are renumbered."""
    all_but_missing = dataclasses.replace(fold, left_out=0)

    def renamed(end: T) -> T:
        number = number_in(end.name, fold.stack)
        if number is None or number <= fold.number:
            return end
        return dataclasses.replace(end, name=renumbered(end.name, fold.stack, number + missing))

    def moved(program_input: ir.Input) -> ir.Input:
        number = fold.number_of(program_input.layer)
        layer = (
            Layer(fold.stack, number + missing) if number is not None and number > fold.number else program_input.layer
        )
        return dataclasses.replace(renamed(program_input), layer=layer)

    program = program.copy()
    for node in program.calls():
        record = ir.record(node)
        if (fold.number_of(record.layer) or 0) > fold.number:
            ir.set_record(node, all_but_missing.record_in_whole(record, missing))
    inputs, outputs = tuple(map(moved, program.inputs)), tuple(map(renamed, program.outputs))
    fold = dataclasses.replace(fold, left_out=fold.left_out + missing)
    return dataclasses.replace(program, inputs=inputs, outputs=outputs, folds=(fold,))


def few_layers(cfg: Config, request: CompileRequest, folding: Folding | None) -> int | None:
    """Return the number of layers to capture of a folded model; None if options may treat its layers differently."""
    if folding is None or not isinstance(cfg.model, ModelConfig) or not are_alike(request.model, folding.alike):
        return None
    first, period = depth_pattern(cfg.model)
    kept_layers = folding.among(request.mesh.world_size)
    # 3: the first and last of the run may differ, and one is left out
    count = first + kept_layers.before + kept_layers.after + 3
    return count if period == 1 and count < cfg.model.n_layers else None


def are_alike(module: nn.Module, alike: Callable[[str], Hashable]) -> bool:
    """Return True if options treat modules and parameters alike that differ only in the layer number."""
    option_of_name: dict[str, str] = {}
    names = itertools.chain(module.named_modules(), module.named_parameters())
    return all(
        option_of_name.setdefault(NUMBER.sub(".*", name), repr(alike(name))) == repr(alike(name)) for name, _ in names
    )


def for_timeline(cfg: Config, candidate: Candidate) -> tuple[int | None, DryStep]:
    """Return (layers, programs) of a setting for its timeline, with few layers if options define the model."""
    if isinstance(cfg.model, ModelConfig) and candidate.mesh.pp == 1:
        layers, (first, period) = cfg.model.n_layers, depth_pattern(cfg.model)
        cfg = replace_nested(cfg, {"model": {"n_layers": min(layers, first + DRAWN * period)}})
        if candidate.first:
            share = max(1, candidate.first.layers * cfg.model.n_layers // layers)  # type: ignore[union-attr]
            candidate = dataclasses.replace(candidate, first=candidate.first._replace(layers=share))
    cfg = candidate.applied(cfg)
    if few := piped.few_stages(cfg):
        cfg = few.cfg
    return getattr(cfg.model, "n_layers", None), compile_layers(cfg)


# ---- between two recomputations ------------------------------------------------------------------------

class Mixture(NamedTuple):
    """The estimate between two settings that differ only in recomputation."""

    estimate: Estimate
    ends: tuple[Candidate, Candidate]


def mixtures(estimates: Iterable[Estimate], limit: float, names: Sequence[str]) -> list[Mixture]:
    """Return the fastest mixture that fits of each kind of settings, fastest first; `names` are the layers in order."""
    kinds: dict[Candidate, list[Estimate]] = {}
    for estimate in estimates:
        # with stages, the first layers are all in one
        has_one_policy = estimate.candidate.first is None and estimate.candidate.mesh.pp == 1
        if estimate.candidate.recompute in POLICIES and has_one_policy:
            kinds.setdefault(replace(estimate.candidate, recompute=""), []).append(estimate)
    fastest = []
    for estimates_of_kind in kinds.values():
        mixtures_of_kind = (
            mix(light, heavy, limit, tuple(names)) for light, heavy in itertools.permutations(estimates_of_kind, 2)
        )
        fastest += sorted(filter(None, mixtures_of_kind), key=lambda m: m.estimate.step_s)[:1]
    return sorted(fastest, key=lambda m: m.estimate.step_s)


def mix(light: Estimate, heavy: Estimate, limit: float, names: tuple[str, ...]) -> Mixture | None:
    """Return the mixture with the fewest layers like `heavy` that fits.

    None unless `heavy` fits, `light` does not, and `light` is faster; also None if all layers have to be like `heavy`.
    """
    if not (light.bytes > limit >= heavy.bytes and light.step_s < heavy.step_s):
        return None
    count = math.ceil(len(names) * (light.bytes - limit) / (light.bytes - heavy.bytes))
    if count >= len(names):
        return None
    candidate = replace(light.candidate, first=First(count, heavy.candidate.recompute, names))
    return Mixture(interpolated(candidate, light, heavy, count / len(names)), (light.candidate, heavy.candidate))


def interpolated(candidate: Candidate, light: Estimate, heavy: Estimate, share: float) -> Estimate:
    """Return the estimate of a setting with a `share` of its layers as in `heavy` and the others as in `light`."""

    def line(low: float, high: float) -> float:
        return low + share * (high - low)

    def lines(low: Mapping[str, float], high: Mapping[str, float]) -> dict[str, float]:
        return {key: line(low.get(key, 0.0), high.get(key, 0.0)) for key in {**low, **high}}

    return Estimate(
        candidate,
        line(light.compute_s, heavy.compute_s),
        lines(light.exposed_s, heavy.exposed_s),
        lines(light.memory, heavy.memory),
        line(light.step_s, heavy.step_s),
        line(light.bytes, heavy.bytes),
        {axis: lines(links, heavy.sent.get(axis, {})) for axis, links in light.sent.items()},
        light.place and heavy.place,
    )
