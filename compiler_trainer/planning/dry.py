"""A dry run: compile for one rank of the mesh and predict its memory, traffic and time on a described cluster.

The programs are those of training, built for one rank of any mesh from weights on the meta device: without a process
group or data; nothing is lowered or run. The console output says how far predictions were from published throughput
(docs/measured/published.md; a test compares the figures here with the table there).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

from compiler_trainer import models
from compiler_trainer.config.device import cluster_of, for_predicting, resolve_cluster
from compiler_trainer.config.schema import PASSAGES, CheckpointConfig, Config, GrpoConfig, ModelConfig
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.console import say
from compiler_trainer.data.image_rows import image_tokens_of_row
from compiler_trainer.models.place import folder_of
from compiler_trainer.models.processor import processor_of
from compiler_trainer.models.subject import Subject, named, subject
from compiler_trainer.planning.simulate import in_flight, kept_for_later, play
from compiler_trainer.planning.snapshots import snapshot_costs, snapshot_table
from compiler_trainer.planning.space import routed_rows
from compiler_trainer.request import CompileRequest
from compiler_trainer.step.captured import (
    Captured,
    StepPrograms,
    check_offsets,
    check_recordable,
    mesh_of,
    one_microbatch,
)
from compiler_trainer.step.effects import effect_lines
from compiler_trainer.step.messages import Message, messages
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.step import state_name
from compiler_trainer.step.turns import Turn, turns_of_step
from compiler_trainer.training import folder
from compiler_trainer.training.checkpoints import left_out
from compiler_trainer.training.loggers import say_contents
from compiler_trainer.training.speed import carried_bytes, compute_dtype, peak_flops
from passes.check.runner import Observer
from passes.cost.clock import Timing
from passes.cost.cluster import Cluster, collective_seconds
from passes.cost.fusion import Fused
from passes.cost.predict import Prediction, predict
from passes.cost.timeline import Timeline, longest
from passes.ir import ir
from passes.ir.bodies import flatten
from passes.ir.machine import Reach
from passes.ir.mesh import Mesh
from passes.ir.task import FORWARD, Task
from passes.lower.host_reads import find_breaks
from passes.pipeline.schedules import Schedule, most_alive

STORED = (*ir.MODEL_STATE, "moment", "gradient")
KEPT = "kept for other programs"
FUSED = "fused away"  # tensors that are never written, as a negative number of bytes
LONGEST = 15  # kernels and collectives named in the report


def dry_run(cfg: Config) -> dict[str, Any]:
    """Compile and predict as `cfg` says; write the report into the run folder and return it.

    Raises UserError, with nothing written, on bad input.
    """
    cfg = validate(for_predicting(cfg), dry_world_size(cfg))
    folder.check(dataclasses.replace(cfg, checkpoint=CheckpointConfig(interval=None)), None, 0)
    target = f"{mesh_of(cfg.mesh).world_size:,} ranks, on {cfg.cluster.name}, in {compute_dtype(cfg)}"
    say(f"dry run of {named(cfg.model)}, {target}")
    with folder.graphs_of(cfg) as dumps:
        compiled = compile_dry(cfg, dumps)
    report = compiled.report | predict_step(cfg, compiled)
    folder.create(cfg, report, compiled.schedule)
    show(cfg, report)
    say_contents(Path(cfg.run.dir))
    return report


@dataclass(frozen=True)
class DryStep:
    """The programs of a training step, each one flat graph, not lowered, and the report of each pass.

    `averaged` are the parameters of which `train.ema` keeps an average, `left_out` the state that checkpoints omit.
    """

    programs: Mapping[str, Captured]
    report: dict[str, Any]
    flops_per_token: int
    schedule: Schedule | None = None
    averaged: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

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
    if not resolve_cluster(cfg.cluster).host_computes:
        check_offsets(programs)
    flat = {name: Captured(flatten(program), ctx) for name, (program, ctx) in programs.items()}
    parameters = trained.module.named_parameters()
    averaged = frozenset(name for name, p in parameters if p.requires_grad and cfg.train.ema is not None)
    flops, schedule = trained.flops_per_token(cfg.train.seq_len), request.schedule(report.cost)
    excluded = left_out(cfg, trained, (captured.program for captured in flat.values()))
    return DryStep(flat, report.finish(), flops, schedule, averaged, excluded)


def request_of(cfg: Config, trained: Subject) -> CompileRequest:
    """Return the request for a job's training programs, always traced on the CPU."""
    rows, length = cfg.train.global_batch_size, cfg.train.seq_len
    batch = {key: torch.empty(rows, length, dtype=torch.int64, device="meta") for key in models.INPUTS}
    batch |= images_of(cfg) if cfg.sees else {}
    if cfg.data.has_groups:
        batch["pairs"] = torch.empty(rows, dtype=torch.int64, device="meta")
    if cfg.data.records == "answers":
        batch["desirable"] = torch.empty(rows, device="meta")
    for name in PASSAGES.get(cfg.data.records, ()):
        batch[name] = torch.empty(rows, dtype=torch.int64, device="meta")
    if cfg.data.margins:
        batch["margins"] = torch.empty(rows, device="meta")
    batch |= {name: torch.empty(rows, device="meta") for name in cfg.reference_entries}
    if isinstance(cfg.loss, GrpoConfig):
        batch |= {name: torch.empty(rows, length, device="meta") for name in cfg.loss.entries}
        batch["advantages"] = torch.empty(rows, device="meta")
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


def images_of(cfg: Config) -> dict[str, Tensor]:
    """Return the entries of a batch of images, [rows, ...] on the meta device."""
    processor, rows = processor_of(folder_of(cfg).path, cfg.data.image_size), cfg.train.global_batch_size
    arrays = processor.row([], cfg.data.images_per_row, image_tokens_of_row(cfg.data, processor))
    return {name: torch.from_numpy(a).expand(rows, *a.shape).to("meta") for name, a in arrays.items()}


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
    turns = [t for t in turns_of_step(programs, step.schedule, cfg.train.microbatches) if t.program in programs]
    value_bytes, sent = carried_bytes(programs), list(messages(turns, programs))
    timing = play(turns, programs, seconds, partial(send_s, value_bytes, mesh, cluster))
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
    if cfg.run.elastic:
        prediction["snapshot"] = snapshot_costs(cfg, step.programs, step.left_out)
    drawing: dict[str, Any] = {}
    if step.schedule is not None:
        prediction["sent_bytes"][PP] = sent_by(busiest, sent, value_bytes, mesh, cluster)
        prediction["exposed_ms"][PP] = 1e3 * (timing.length - timing.busy[busiest])
        pipeline_parts = programs, timing, seconds, memories, sent
        prediction["pipeline"] = pipeline_of(cfg.passes.pipeline.schedule, step.schedule, *pipeline_parts)
        drawing = {"pipeline": draw_schedule(cfg.passes.pipeline.schedule, step.schedule, timing)}
    return {
        "predicted": {"peak_mem_bytes": memory["bytes"], **speed(cfg, step.flops_per_token, timing.length)},
        "prediction": prediction,
        "sent_bytes": {axis: sum(links.values()) for axis, links in prediction["sent_bytes"].items()},
        "timeline": [event for name, timeline in timelines.items() for event in events(name, timeline)],
        **drawing,
    }


def is_recorded(cfg: Config, step: DryStep) -> bool:
    """Return True if the whole step is replayed as CUDA graphs."""
    if not cfg.lower.cudagraphs:
        return False
    compiled = cfg.lower.backend == "inductor"
    return not any(find_breaks(program, compiled) for program, _ in step.programs.values())


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
    averages = averages_bytes(step, kept_by_program)
    state_bytes = {key: count for bytes_by_name in state.values() for key, count in bytes_by_name.items()}

    def needed(name: str) -> dict[str, Any]:
        costs = step.costs(name)
        others = sum(count for key, count in state_bytes.items() if key not in state[name])
        other_bytes = {"state of other programs": others, "averages": averages, **kept_by_program[name]}
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
        FUSED: min(0, written_bytes - memory["bytes"]),
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


def averages_bytes(step: DryStep, names: Iterable[str]) -> int:
    """Return the bytes of the averages (`train.ema`) of the parameters that programs read."""
    weights = {
        i.original: ir.example(node)
        for program in (step.programs[name].program for name in names)
        for i, node in zip(program.inputs, program.placeholders(), strict=True)
        if i.kind == "parameter" and i.original in step.averaged
    }
    return sum(weight.numel() * max(4, weight.itemsize) for weight in weights.values())


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
    chosen = timeline.spans.items() if count is None else longest(timeline, count)
    return [
        {
            "program": program,
            "node": node,
            "stream": span.stream,
            "start_ms": round(1e3 * span.start, 4),
            "end_ms": round(1e3 * span.end, 4),
        }
        for node, span in chosen
    ]


# ---- pipeline stages -----------------------------------------------------------------------------------

PP = "pp"


def pipeline_of(
    name: str,
    schedule: Schedule,
    programs: Mapping[str, ir.Program],
    timing: Timing,
    seconds: Mapping[str, float],
    memory: Sequence[Mapping[str, Any]],
    sent: Iterable[Message],
) -> dict[str, Any]:
    """Return the report; `memory` is that of each pipeline rank, `sent` are the messages of a step."""
    return {
        "schedule": name,
        "idle": idle(timing),
        "ranks_of_stages": schedule.rank_of,
        "layers": [layers_of(programs[str(Task(stage, FORWARD))]) for stage in range(schedule.stages)],
        "task_ms": {name: 1e3 * s for name, s in seconds.items()},
        "busy_ms": [1e3 * timing.busy[rank] for rank in range(schedule.ranks)],
        "forwards_kept": most_alive(schedule),
        "memory": [{key: peak[key] for key in ("device_bytes", "bytes", "fits", "kinds")} for peak in memory],
        "sent_a_microbatch": traffic_between_ranks(sent, carried_bytes(programs)),
    }


def idle(timing: Timing) -> float:
    """Return the idle share of all ranks' time until the last microbatch is done."""
    return timing.of(lambda turn: turn.microbatch is not None).idle


def draw_schedule(name: str, schedule: Schedule, timing: Timing) -> dict[str, Any]:
    """Return the schedule in the form in which a page draws it."""
    return {"schedule": name, "unit": "ms", "idle": idle(timing), "slots": slots(timing, schedule.ranks)}


def layers_of(program: ir.Program) -> list[str]:
    """Return the names of the layers that a program computes."""
    return list(dict.fromkeys(str(layer) for node in program.calls() if (layer := ir.layer(node))))


def traffic_between_ranks(sent: Iterable[Message], size: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the bytes of the first microbatch from one rank to another, and the names of the values sent."""
    by_pair: dict[tuple[int, int], dict[str, Any]] = {}
    for message in sent:
        name, microbatch = message.key
        if microbatch == 0:
            no_messages = {"source": message.source, "to": message.to, "bytes": 0, "values": []}
            border = by_pair.setdefault((message.source, message.to), no_messages)
            border["bytes"] += size[name]
            border["values"].append(name)
    return [by_pair[pair] for pair in sorted(by_pair)]


def slots(timing: Timing, ranks: int) -> list[list[tuple[str, float, float]]]:
    """Return a row a rank: (label of the task, start, end), in milliseconds."""
    rows: list[list[tuple[str, float, float]]] = [[] for _ in range(ranks)]
    for turn, (start, end, _) in timing.spans.items():
        rows[turn.rank].append((turn_label(turn), round(1e3 * start, 4), round(1e3 * end, 4)))
    return rows


def turn_label(turn: Turn) -> str:
    """Return `F0.2` for the forward of microbatch 0 in stage 2, `U1` for the update of rank 1."""
    if turn.microbatch is None or turn.task is None:
        return turn.program
    return f"{turn.task.kind}{turn.microbatch}.{turn.task.stage}"


# ---- links ------------------------------------------------------------------------------------------------


def link(mesh: Mesh, message: Message, gpus_per_node: int) -> Reach:
    """Return the reach of a message: two ranks in a node, or in two nodes.

    Ranks next to the two send as well, so the farthest pair counts.
    """
    first, last = sorted((message.source, message.to))
    stride = mesh.stride(PP)
    in_one_node = first * stride // gpus_per_node == ((last + 1) * stride - 1) // gpus_per_node
    return Reach(1, 2) if in_one_node else Reach(2, 1)


def send_s(size: Mapping[str, int], mesh: Mesh, cluster: Cluster, message: Message) -> float:
    """Return the seconds that a message travels."""
    between = link(mesh, message, cluster.gpus_per_node)
    return collective_seconds("shift", size[message.key[0]], between, cluster.links)


def sent_by(
    rank: int, sent: Iterable[Message], size: Mapping[str, int], mesh: Mesh, cluster: Cluster
) -> dict[str, int]:
    """Return the bytes that a pipeline rank sends to other ranks in a step, by link."""
    total = Counter(intra=0, inter=0)
    for message in sent:
        if message.source == rank:
            between = link(mesh, message, cluster.gpus_per_node)
            total["intra" if between.nodes == 1 else "inter"] += size[message.key[0]]
    return dict(total)


# ---- console output ------------------------------------------------------------------------------------


def show(cfg: Config, report: dict[str, Any]) -> None:
    """Print the prediction as tables: speed, memory, communication, and the figures of the cluster."""
    console = Console(file=sys.stdout)
    for line in effect_lines(report):
        say(line)
    for table in (speed_table(report), memory_table(cfg, report), communication_table(report), cluster_table(cfg)):
        if table.rows:
            console.print(table)
    if "snapshot" in report["prediction"]:
        console.print(snapshot_table(report["prediction"]["snapshot"]))
    if "pipeline" in report["prediction"]:
        console.print(stages(report["prediction"]["pipeline"]))
    if error := error_bar(cfg):
        console.print(error, soft_wrap=True)


def stages(report: dict[str, Any]) -> str:
    """Return the pipeline in one line."""
    busy, sizes = report["busy_ms"], [each["device_bytes"] for each in report["memory"]]
    busiest, largest = busy.index(max(busy)), sizes.index(max(sizes))
    extremes = (
        f"busiest rank {busiest}, {busy[busiest]:,.1f} ms; largest rank {largest}, {sizes[largest] / 2**30:,.2f} GiB"
    )
    stages = len(report["ranks_of_stages"])
    return (
        f"pipeline: {report['schedule']}, {stages} stages on {len(busy)} ranks, idle {report['idle']:.1%}; {extremes}"
    )


def speed_table(report: dict[str, Any]) -> Table:
    """Return a table of time and throughput, and of the parts of a step's time."""
    table = Table("", "a rank", title="step")
    predicted, prediction = report["predicted"], report["prediction"]
    table.add_row("step, ms", f"{predicted['step_ms']:,.1f}")
    table.add_row("tokens/s/GPU", f"{predicted['tokens_per_s_per_gpu']:,.0f}")
    table.add_row("MFU", f"{predicted['mfu']:.1%}")
    table.add_row("computing, ms", f"{prediction['compute_ms']:,.1f}")
    table.add_row("  of it, slowed by collectives", f"{prediction['slowed_ms']:,.1f}")
    table.add_row("waiting for launches, ms", f"{prediction['launch_ms']:,.1f}")
    for axis in prediction["sent_bytes"]:
        table.add_row(f"waiting for {axis}, ms", f"{prediction['exposed_ms'].get(axis, 0):,.1f}")
    return table


def memory_table(cfg: Config, report: dict[str, Any]) -> Table:
    """Return a table of the bytes alive at the peak."""
    peak = report["prediction"]["memory"]
    verdict = "fits" if peak["fits"] else "DOES NOT FIT"
    unit, scale = ("GiB", 2**30) if peak["bytes"] >= 2**30 else ("MiB", 2**20)
    table = Table("at the peak", f"{unit} a rank", title=f"memory: {verdict} {cfg.cluster.hbm_gib:g} GiB")
    for kind, size in sorted(peak["kinds"].items(), key=lambda item: -item[1]):
        table.add_row(kind, f"{size / scale:,.2f}")
    table.add_section()
    table.add_row(f"alive, at %{peak['node']} ({peak['line']})", f"{peak['bytes'] / scale:,.2f}")
    for kind, size in peak["beside"].items():
        table.add_row(kind, f"{size / scale:,.2f}")
    table.add_section()
    table.add_row("on the device", f"{peak['device_bytes'] / scale:,.2f}")
    return table


def communication_table(report: dict[str, Any]) -> Table:
    """Return a table of the bytes that a rank sends in a step."""
    table = Table("axis", "in its node", "to other nodes", title="sent by a rank")
    for axis, links in report["prediction"]["sent_bytes"].items():
        table.add_row(axis, decimal(links["intra"]), decimal(links["inter"]))
    return table


def cluster_table(cfg: Config) -> Table:
    """Return a table of the cluster's figures that the prediction uses, with their sources."""
    table = Table("figure", "", "from", title=f"taken of {cfg.cluster.name}")
    for name, source in cfg.cluster.sources.items():
        value = getattr(cfg.cluster, name, "")  # the user's sources may be of something else
        text = f"{value:g}" if isinstance(value, float) else value
        table.add_row(name, text if isinstance(text, str) else "", source)
    return table


MEDIAN, LARGEST = 0.085, 0.222  # over the judged rows of the table, all of dense models
EXPERTS = 0.44, 0.57  # predicted faster by this, for mixtures of experts whose host waits for token counts


def error_bar(cfg: Config) -> str:
    """Return a sentence on the error of a prediction; empty for a CPU, for which nothing is published."""
    if cfg.cluster.host_computes:
        return ""
    has_experts = bool(cfg.model.experts) if isinstance(cfg.model, ModelConfig) else routed_rows(cfg) > 1
    if has_experts:
        most, least = (1 - 1 / (1 + error) for error in reversed(EXPERTS))
        return f"mixtures of experts were {least:.0%} to {most:.0%} slower than predicted in 3 published jobs"
    return f"predictions are {MEDIAN:.1%} off published throughput in the median, {LARGEST:.0%} at most"
