"""A dry run: compile for one rank of the mesh and predict its memory, traffic and time on a described cluster.

The programs are those of training, built for one rank of any mesh from weights on the meta device: without a process
group or data; nothing is lowered or run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compiler_trainer import models
from compiler_trainer.config.clusters import cluster_of
from compiler_trainer.config.device import described, for_predicting
from compiler_trainer.config.schema import CheckpointConfig, Config, DpoConfig
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.console import say
from compiler_trainer.data.pairs import REFERENCE
from compiler_trainer.models.subject import Subject, named, subject
from compiler_trainer.planning import stages
from compiler_trainer.planning.dry_table import show
from compiler_trainer.planning.playing import in_flight, kept_for_later, play
from compiler_trainer.planning.stages import PP
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.given import (
    Captured,
    StepPrograms,
    check_offsets,
    check_recordable,
    mesh_of,
    one_microbatch,
)
from compiler_trainer.step.messages import messages
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.step import state_name
from compiler_trainer.step.turns import Turn, turns_of_step
from compiler_trainer.training import folder
from compiler_trainer.training.progress import say_contents
from compiler_trainer.training.speed import computes_in, peak_flops
from passes.check.runner import Observer
from passes.cost.fusion import Fused
from passes.cost.predict import Prediction, predict
from passes.cost.timeline import Timeline, longest
from passes.lower.host_reads import breaks
from passes.pipeline.tables import Table
from passes.program import ir
from passes.program.bodies import flatten

STORED = ("parameter", "buffer", "moment", "gradient")
KEPT = "kept for other programs"
LONGEST = 15  # kernels and collectives named in the report


def dry_run(cfg: Config) -> dict[str, Any]:
    """Compile and predict as `cfg` says; write the report into the run folder and return it.

    Raises UserError, with nothing written, on bad input.
    """
    cfg = validate(for_predicting(cfg), dry_world_size(cfg))
    folder.check(dataclasses.replace(cfg, checkpoint=CheckpointConfig(interval=None)), None, 0)
    target = f"{mesh_of(cfg.mesh).world_size:,} ranks, on {cfg.cluster.name}, in {computes_in(cfg)}"
    say(f"dry run of {named(cfg.model)}, {target}")
    with folder.graphs_of(cfg) as dumps:
        compiled = compile_dry(cfg, dumps)
    report = compiled.report | predict_step(cfg, compiled)
    folder.create(cfg, report, compiled.table)
    show(cfg, report)
    say_contents(Path(cfg.run.dir))
    return report


@dataclass(frozen=True)
class DryStep:
    """The programs of a training step, each one flat graph, not lowered, and the report of each pass."""

    programs: Mapping[str, Captured]
    report: dict[str, Any]
    flops_per_token: int
    table: Table | None = None

    def costs(self, name: str) -> dict[str, Any]:
        """Return the accounting of a program after its last pass (`passes.cost.accounting.Accounting`)."""
        return [report for report in self.report["passes"] if report["program"] == name][-1]["accounting"]


def compile_dry(cfg: Config, observe: Observer | None) -> DryStep:
    """Return the programs that training would lower."""
    trained = subject(cfg)
    request = request_of(cfg, trained)
    return flat_step(cfg, trained, request, compile_programs(request, observe=observe))


def flat_step(cfg: Config, trained: Subject, request: CompileRequest, compiled: StepPrograms) -> DryStep:
    """Return the programs as flat graphs; raise UserError if they cannot run as the options say."""
    programs, report = compiled.programs, compiled.report
    if cfg.lower.cudagraphs is True:
        check_recordable(programs, cfg.lower.backend == "inductor")
    if not described(cfg.cluster).host_computes:
        check_offsets(programs)
    flat = {name: Captured(flatten(program), ctx) for name, (program, ctx) in programs.items()}
    return DryStep(flat, report.finish(), trained.flops_per_token(cfg.train.seq_len), request.table(report.cost))


def request_of(cfg: Config, trained: Subject) -> CompileRequest:
    """Return the request for a job's training programs, always traced on the CPU."""
    rows, length = cfg.train.global_batch_size, cfg.train.seq_len
    batch = {key: torch.empty(rows, length, dtype=torch.int64, device="meta") for key in models.INPUTS}
    if cfg.data.pairs:
        batch["pairs"] = torch.empty(rows, dtype=torch.int64, device="meta")
    if isinstance(cfg.loss, DpoConfig):
        batch |= {name: torch.empty(rows, device="meta") for name in REFERENCE}
    return CompileRequest(
        model=trained.module,
        loss_fn=trained.loss,
        batch=one_microbatch(batch, cfg.train.microbatches),
        mesh=mesh_of(cfg.mesh),
        passes=cfg.passes,
        optim=cfg.optim,
        cluster=cfg.cluster,
        microbatches=cfg.train.microbatches,
        skip_nonfinite=cfg.train.nonfinite == "skip",
        evaluate=False,
    )


# ---- the prediction -----------------------------------------------------------------------------------


def predict_step(cfg: Config, step: DryStep, fused: Fused | None = None) -> dict[str, Any]:
    """Return the prediction of a step: `predicted`, its parts as `prediction`, and the `timeline` of each program.

    `fused` tells which operators may share kernels; by default the backend decides.
    """
    recorded = dataclasses.replace(cfg.cluster, launch_us=0.0)  # the host launches the whole step at once
    cluster = cluster_of(recorded if is_recorded(cfg, step) else cfg.cluster)
    interpreted = cfg.lower.backend == "eager"
    fused = fused or (lambda node: not interpreted)
    # similar stages share a graph
    captured_by_graph = {captured.program.graph: captured for captured in step.programs.values()}
    by_graph = {graph: predict(*captured, cluster, fused, interpreted) for graph, captured in captured_by_graph.items()}
    predictions = {name: by_graph[captured.program.graph] for name, captured in step.programs.items()}
    timelines = {name: p.timeline for name, p in predictions.items()}
    seconds = {name: timeline.step_s for name, timeline in timelines.items()}
    programs, mesh = {name: captured.program for name, captured in step.programs.items()}, mesh_of(cfg.mesh)
    turns = [t for t in turns_of_step(programs, step.table, cfg.train.microbatches) if t.program in programs]
    value_bytes, sent = stages.sizes_of(programs), list(messages(turns, programs))
    timing = play(turns, programs, seconds, partial(stages.send_s, value_bytes, mesh, cluster))
    written = {name: p.peak_bytes for name, p in predictions.items()}
    ranks = sorted({turn.rank for turn in turns})
    memories = [on_device(cfg, peak_memory(step, turns, rank, value_bytes, written)) for rank in ranks]
    memory = max(memories, key=lambda peak: peak["device_bytes"])
    busiest = max(ranks, key=timing.busy.__getitem__)
    runs = Counter(turn.program for turn in turns if turn.rank == busiest)
    prediction = {
        "cluster": dataclasses.asdict(cfg.cluster),
        "ranks": mesh.world_size,
        "memory": memory,
        "flops": weighted_sum((step.costs(name)["flops"], times) for name, times in runs.items()),
        "model_flops_per_token": step.flops_per_token,
        "sent_bytes": sent_bytes(predictions, runs),
        **times_ms(timelines, runs),
        "longest": [event for name in runs for event in events(name, timelines[name], LONGEST)],
    }
    drawing = {}
    if step.table is not None:
        prediction["sent_bytes"][PP] = stages.sent_by(busiest, sent, value_bytes, mesh, cluster)
        prediction["exposed_ms"][PP] = 1e3 * (timing.length - timing.busy[busiest])
        pipeline_parts = programs, timing, seconds, memories, sent
        prediction["pipeline"] = stages.pipeline_of(cfg.passes.pipeline.schedule, step.table, *pipeline_parts)
        drawing = {"pipeline": stages.drawing(cfg.passes.pipeline.schedule, step.table, timing)}
    return {
        "predicted": {"peak_mem_bytes": memory["bytes"], **speed(cfg, step.flops_per_token, timing.length)},
        "prediction": prediction,
        "timeline": [event for name, timeline in timelines.items() for event in events(name, timeline)],
        **drawing,
    }


def is_recorded(cfg: Config, step: DryStep) -> bool:
    """Return True if the whole step is replayed as CUDA graphs."""
    if not cfg.lower.cudagraphs:
        return False
    compiled = cfg.lower.backend == "inductor"
    return not any(breaks(program, compiled) for program, _ in step.programs.values())


def speed(cfg: Config, flops_per_token: int, step_s: float) -> dict[str, float]:
    """Return the time of a step, throughput, and MFU.

    MFU is relative to the peak in the dtype of computation, even if matmuls run in float8.
    """
    tokens = cfg.train.global_batch_size * cfg.train.seq_len / mesh_of(cfg.mesh).world_size
    mfu = flops_per_token * tokens / step_s / peak_flops(cfg)
    return {"step_ms": 1e3 * step_s, "tokens_per_s_per_gpu": tokens / step_s, "mfu": mfu}


def peak_memory(
    step: DryStep, turns: Sequence[Turn], rank: int, value_bytes: Mapping[str, int], written: Mapping[str, int]
) -> dict[str, Any]:
    """Return the most bytes alive on a pipeline rank, with place and kinds.

    They include the state of the rank's other programs and their carried values. `written` has each program's peak
    bytes without tensors that fusion never writes, `size` the bytes of carried values.
    """
    programs = {name: captured.program for name, captured in step.programs.items()}
    kept_by_program: dict[str, dict[str, int]] = {}
    flights = in_flight(turns, programs, rank, value_bytes)
    for (turn, for_others), (_, flight) in zip(
        kept_for_later(turns, programs, rank, value_bytes), flights, strict=True
    ):
        parts = {KEPT: for_others, "buffers of receives": flight.receives, "tensors being sent": flight.sends}
        kept_by_program[turn.program] = max(
            parts, kept_by_program.get(turn.program, parts), key=lambda each: sum(each.values())
        )
    state = {name: stored_bytes(step.programs[name]) for name in kept_by_program}
    state_bytes = {key: count for bytes_by_name in state.values() for key, count in bytes_by_name.items()}

    def needed(name: str) -> dict[str, Any]:
        costs = step.costs(name)
        others = sum(count for key, count in state_bytes.items() if key not in state[name])
        other_bytes = {"state of other programs": others, **kept_by_program[name]}
        kinds = costs["alive"] | {kind: count for kind, count in other_bytes.items() if count}
        at = {"program": name, "node": costs["peak_node"], "line": costs["peak_line"]}
        peaks = {"bytes": costs["peak_bytes"], "written_bytes": written[name]}
        return {key: peak + sum(other_bytes.values()) for key, peak in peaks.items()} | at | {"kinds": kinds}

    needs = list(map(needed, kept_by_program))
    largest = max(needs, key=lambda need: need["bytes"])
    return largest | {"written_bytes": max(need["written_bytes"] for need in needs)}


def on_device(cfg: Config, memory: dict[str, Any]) -> dict[str, Any]:
    """Add the bytes on the device beyond the peak to `memory`, as the cluster states them, and whether it all fits.

    Tensors that fusion never writes are subtracted.
    """
    cluster, written_bytes = cfg.cluster, memory["written_bytes"]
    beyond_peak = {
        "fused away": min(0, written_bytes - memory["bytes"]),
        "allocator": round(cluster.allocator_loss * written_bytes),
        "context": round(2**30 * cluster.context_gib),
        "communicators": round(2**30 * cluster.communicator_gib) if mesh_of(cfg.mesh).world_size > 1 else 0,
    }
    device = memory["bytes"] + sum(beyond_peak.values())
    totals = {"beside": beyond_peak, "reserved_bytes": written_bytes + beyond_peak["allocator"]}
    return memory | totals | {"device_bytes": device, "fits": device <= cluster.hbm_gib * 2**30}


def stored_bytes(captured: Captured) -> dict[str, int]:
    """Return the bytes of the state that a program reads, by name."""
    inputs = zip(captured.program.inputs, captured.program.placeholders(), strict=True)
    return {state_name(i): ir.example(node).nbytes for i, node in inputs if i.kind in STORED}


def sent_bytes(predictions: Mapping[str, Prediction], runs: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the bytes that a rank sends in a step, by axis and link."""
    total: dict[str, dict[str, int]] = {}
    for name, prediction in predictions.items():
        for (axis, link), size in prediction.sent_bytes.items():
            links = total.setdefault(axis, {"intra": 0, "inter": 0})
            links[link] += round(runs[name] * size)
    return total


def times_ms(timelines: Mapping[str, Timeline], runs: Mapping[str, int]) -> dict[str, Any]:
    """Return the milliseconds of a step: computing, slowdown by collectives, launches, and waiting by axis."""

    def total_ms(figure: str) -> float:
        return 1e3 * sum(runs[name] * getattr(timeline, figure) for name, timeline in timelines.items())

    exposed = weighted_sum((timeline.exposed_s, runs[name]) for name, timeline in timelines.items())
    return {
        "compute_ms": total_ms("compute_s"),
        "slowed_ms": total_ms("slowed_s"),
        "launch_ms": total_ms("launch_s"),
        "exposed_ms": {axis: 1e3 * s for axis, s in exposed.items()},
    }


def weighted_sum(parts: Any) -> dict[str, Any]:
    """Return the sum of tables of numbers, each multiplied by its count."""
    total: Counter[str] = Counter()
    for table, times in parts:
        total.update({key: times * value for key, value in table.items()})
    return dict(total)


def events(program: str, timeline: Timeline, count: int | None = None) -> list[dict[str, Any]]:
    """Return the events of a program in milliseconds from its start: all, or the `count` longest."""
    chosen = timeline.events if count is None else longest(timeline, count)
    return [
        {
            "program": program,
            "node": event.node,
            "stream": event.stream,
            "start_ms": round(1e3 * event.start_s, 4),
            "end_ms": round(1e3 * event.end_s, 4),
        }
        for event in chosen
    ]
