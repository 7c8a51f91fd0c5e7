"""The report of a dry run on pipeline stages: layers and seconds of each, idle time, messages, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compiler_trainer.step.messages import Message
from compiler_trainer.step.turns import Turn
from passes.cost.clock import Timing
from passes.cost.cluster import Cluster, collective_seconds
from passes.pipeline.tables import Table, most_alive
from passes.program import ir
from passes.program.machine import Reach
from passes.program.mesh import Mesh
from passes.program.task import FORWARD, Task

PP = "pp"


def pipeline_of(
    schedule: str,
    table: Table,
    programs: Mapping[str, ir.Program],
    timing: Timing,
    seconds: Mapping[str, float],
    memory: Sequence[Mapping[str, Any]],
    sent: Iterable[Message],
) -> dict[str, Any]:
    """Return the report; `memory` is that of each pipeline rank, `sent` are the messages of a step."""
    return {
        "schedule": schedule,
        "idle": idle(timing),
        "ranks_of_stages": table.rank_of,
        "layers": [layers_of(programs[str(Task(stage, FORWARD))]) for stage in range(table.stages)],
        "task_ms": {name: 1e3 * s for name, s in seconds.items()},
        "busy_ms": [1e3 * timing.busy[rank] for rank in range(table.ranks)],
        "forwards_kept": most_alive(table),
        "memory": [{key: peak[key] for key in ("device_bytes", "bytes", "fits", "kinds")} for peak in memory],
        "sent_a_microbatch": traffic_between_ranks(sent, sizes_of(programs)),
    }


def idle(timing: Timing) -> float:
    """Return the idle share of all ranks' time until the last microbatch is done."""
    return timing.of(lambda turn: turn.microbatch is not None).idle


def drawing(schedule: str, table: Table, timing: Timing) -> dict[str, Any]:
    """Return the schedule in the form in which a page draws it."""
    return {"schedule": schedule, "unit": "ms", "idle": idle(timing), "slots": slots(timing, table.ranks)}


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


def sizes_of(programs: Mapping[str, ir.Program]) -> dict[str, int]:
    """Return the bytes of carried values, by name."""
    return {
        program_input.name: ir.example(node).nbytes
        for program in programs.values()
        for program_input, node in zip(program.inputs, program.placeholders(), strict=True)
        if program_input.kind == "carried"
    }


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
