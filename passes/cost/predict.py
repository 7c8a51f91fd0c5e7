"""How long a step will take on a described cluster, read from the final graph: nothing is run.

Kernels (`fusion.py`) run one after another on the compute stream of a rank, collectives on one stream an axis.
A kernel takes max(FLOPs / rate, bytes / memory bandwidth) and a fixed start; for collectives see `cluster.py`.
A collective starts when what was issued before it is done and its axis is free; a wait holds the compute stream until
its collective is done, and what it is held counts as exposed on that axis.

The program's own order is played, as the last pass left it: that is what is lowered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from passes.cost.accounting import SENT, axis_of, bind, count_flops, kind_of, payload_bytes
from passes.cost.cluster import Cluster, Reach, between_nodes, collective_seconds, reach, within_nodes
from passes.cost.fusion import Kernel, fuse
from passes.program import ir, routed
from passes.program.sweep import Sweep, sweep, tensors
from passes.rules import name_of

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """One kernel or collective on the timeline: its stream is `compute` or an axis."""

    node: str
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step on one rank: how long, how much of it computing, and how long each axis kept it waiting."""

    step_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Prediction:
    """The timeline of a program, and the bytes that a rank sends by (axis, link)."""

    timeline: Timeline
    sent_bytes: Mapping[tuple[str, str], float]


def predict(program: ir.Program, ctx: ir.Context, cluster: Cluster) -> Prediction:
    """What one run of a program with its collectives written out takes.

    Raises CompileError naming the first product in a dtype that the cluster has no rate for.
    """
    swept = sweep(program, ctx)
    costs = Costs(program, swept, cluster)
    kernels = fuse(program, swept)
    return Prediction(play(kernels, costs.seconds), costs.sent(kernels))


# ---- what a kernel costs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of the kernels of a program on a cluster."""

    program: ir.Program
    swept: Sweep
    cluster: Cluster

    def seconds(self, kernel: Kernel) -> float:
        """How long a kernel or a collective takes on its stream; a wait takes none of its own."""
        if kernel.kind == "wait":
            return 0.0
        if kernel.kind == "collective":
            return collective_seconds(*self.transfer(kernel), self.cluster)
        computing = sum(flops / self.rate(node) for node in kernel.nodes if (flops := self.flops(node)))
        return max(computing, kernel.moved_bytes / self.cluster.hbm_bytes_per_s) + self.cluster.kernel_s

    def flops(self, node: fx.Node) -> float:
        """FLOPs that a kernel really does: a causal attention leaves out half of what is counted.

        Of experts that are spread over ranks, those of the rank that gets most rows: no more than it has room for.
        """
        counted = count_flops(node, self.swept)
        if counted and node.target in (routed.grouped_mm, routed.grouped_outer):
            return counted * min(self.cluster.expert_load, bind(node).get("among", 1.0))
        return counted / 2 if counted and is_attention(node) and bind(node).get("is_causal") else counted

    def rate(self, node: fx.Node) -> float:
        """FLOPs a second of a product or an attention."""
        if is_attention(node):
            return self.cluster.attention_flops_per_s
        dtype = next(tensors(self.swept.values[node.all_input_nodes[0]])).layout.dtype
        kind = torch.float8_e4m3fn if dtype.is_floating_point and dtype.itemsize == 1 else dtype
        if kind not in self.cluster.matmul_flops_per_s:
            raise ir.CompileError("predict", node, f"computes in {dtype}, for which the cluster states no rate")
        return self.cluster.matmul_flops_per_s[kind]

    def transfer(self, kernel: Kernel) -> tuple[str, int, Reach]:
        """The kind of a collective, the bytes that a rank sends, and where its axis lies."""
        (node,) = kernel.nodes
        kind, axis = kind_of(node), axis_of(node)
        assert kind is not None and axis is not None
        sent = SENT[kind](payload_bytes(node, self.swept, self.program.mesh), self.program.mesh[axis])
        return kind, sent, reach(self.program.mesh, axis, self.cluster.gpus_per_node)

    def sent(self, kernels: Iterable[Kernel]) -> dict[tuple[str, str], float]:
        """Bytes that a rank sends over each axis, inside its node and out of it."""
        found: Counter[tuple[str, str]] = Counter()
        for kernel in kernels:
            if kernel.kind == "collective":
                transfer, axis = self.transfer(kernel), axis_of(kernel.nodes[0])
                found[str(axis), "intra"] += within_nodes(*transfer)  # type: ignore[assignment]
                found[str(axis), "inter"] += between_nodes(*transfer)  # type: ignore[assignment]
        return dict(found)


def is_attention(node: fx.Node) -> bool:
    """Whether a node is an attention kernel."""
    return "attention" in name_of(node)


# ---- the timeline -----------------------------------------------------------------------------------


def play(kernels: Iterable[Kernel], seconds: Callable[[Kernel], float]) -> Timeline:
    """Let the kernels run in the given order, each on its stream."""
    now, done, axes = 0.0, dict[Kernel, float](), dict[Kernel, str]()
    free: Counter[str] = Counter()
    exposed: Counter[str] = Counter()
    events = []
    computing = 0.0
    for kernel in kernels:
        ready = max((done[k] for k in kernel.after), default=0.0)
        axis = axis_of(kernel.nodes[0]) if kernel.kind == "collective" else None
        if kernel.kind == "wait":
            waited = next(axes[k] for k in kernel.after if k in axes)
            exposed[waited] += max(0.0, ready - now)  # type: ignore[assignment]
            now = done[kernel] = max(now, ready)
            continue
        took = seconds(kernel)
        start = max(now, ready) if axis is None else max(now, ready, free[axis])
        done[kernel] = start + took
        if axis is None:
            now, computing = start + took, computing + took
        else:
            free[axis], axes[kernel] = start + took, axis  # type: ignore[assignment]
        events.append(Event(kernel.nodes[-1].name, axis or COMPUTE, start, start + took))
    end = max((event.end_s for event in events), default=0.0)
    return Timeline(max(now, end), computing, dict(exposed), tuple(events))


def longest(timeline: Timeline, count: int) -> list[Event]:
    """The kernels and collectives that take longest."""
    return sorted(timeline.events, key=lambda event: event.start_s - event.end_s)[:count]
