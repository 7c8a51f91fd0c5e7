"""How long a step will take on a described cluster, read from the final graph: nothing is run.

A product takes its FLOPs at the rate that products of its size and dtype reach, an attention at that of its length, a
loop (`fusion.py`) the bytes that it moves; for collectives see `cluster.py`, for what runs beside what `timeline.py`.

The program's own order is played, as the last pass left it: that is what is lowered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from passes.context.operators import is_backward, kernel_of
from passes.cost.accounting import SENT, count_flops, lifetimes, payload_bytes
from passes.cost.cluster import Cluster, collective_seconds
from passes.cost.fusion import Fused, Kernel, fuse
from passes.cost.timeline import Cost, Timeline, play
from passes.program import ir, routed
from passes.program.abstract_eval import Avals, abstract_eval, tensors
from passes.program.machine import Reach, between_nodes, reach, within_nodes
from passes.program.operators import axis_of, bind, kind_of

GROUPED = (routed.grouped_mm, routed.grouped_outer)


@dataclass(frozen=True)
class Prediction:
    """The timeline of a program, the bytes that a rank sends by (axis, link), and the most that are alive at once.

    The last is without what stays inside kernels.
    """

    timeline: Timeline
    sent_bytes: Mapping[tuple[str, str], float]
    peak_bytes: int


def predict(
    program: ir.Program,
    ctx: ir.Context,
    cluster: Cluster,
    fused: Fused = lambda node: True,
    interpreted: bool = False,
) -> Prediction:
    """What one run of a program with its collectives written out takes; what is not `fused` is a kernel an operator.

    An `interpreted` program costs the host time for each operator, views included. Raises CompileError naming the first
    product in a dtype that the cluster has no rate for.
    """
    avals = abstract_eval(program, ctx)
    costs = Prices(program, avals, cluster)
    kernels = fuse(program, avals, fused)
    rates = cluster.rates
    operators = operators_until(program, kernels) if interpreted else {}
    launch_s = (lambda kernel: rates.operator_s * operators[kernel]) if interpreted else (lambda kernel: rates.launch_s)
    timeline = play(kernels, costs.of, cluster.beside, launch_s, rates.host_computes)
    return Prediction(timeline, costs.sent(kernels), written_peak(program, avals, kernels))


def operators_until(program: ir.Program, kernels: Iterable[Kernel]) -> dict[Kernel, int]:
    """How many operators the host runs for each kernel: itself, and views and waits since the one before."""
    place = {node: i for i, node in enumerate(program.calls(), 1)}
    found, reached = {}, 0
    for kernel in kernels:
        here = max(place[node] for node in kernel.nodes)
        found[kernel], reached = max(0, here - reached), max(here, reached)
    return found


def written_peak(program: ir.Program, avals: Avals, kernels: Iterable[Kernel]) -> int:
    """The most bytes alive at once in the program's order, of storages that are written at all."""
    unwritten = frozenset[int]().union(*(kernel.unwritten for kernel in kernels))
    change = [0] * (len(program.graph.nodes) + 1)
    for storage, (born, last) in lifetimes(program, avals).items():
        if storage not in unwritten:
            change[born] += avals.storage_bytes[storage]
            change[last + 1] -= avals.storage_bytes[storage]
    return max(accumulate(change))


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes of the kernels of a program on a cluster."""

    program: ir.Program
    avals: Avals
    cluster: Cluster

    def of(self, kernel: Kernel) -> Cost:
        """How long a kernel or a collective takes on its stream."""
        if kernel.kind == "collective":
            return Cost(collective_seconds(*self.transfer(kernel), self.cluster.links))
        rates = self.cluster.rates
        computing = sum(flops / self.rate(node, flops) for node in kernel.nodes if (flops := self.flops(node)))
        moving = kernel.moved_bytes / rates.memory.at(max(1, kernel.moved_bytes))
        if computing:  # what was measured of products begins when they are launched
            return Cost(max(computing, moving, rates.kernel_s), is_moving=moving > computing)
        return Cost(moving + rates.kernel_s)

    def flops(self, node: fx.Node) -> float:
        """FLOPs that a kernel really does: a causal attention leaves out half of what is counted.

        Of experts that are spread over ranks, those of the rank that gets most rows: no more than it has room for.
        """
        counted = count_flops(node, self.avals)
        if counted and node.target in GROUPED:
            return counted * min(self.cluster.expert_load, bind(node).get("among", 1.0))
        return counted / 2 if counted and kernel_of(node) and bind(node).get("is_causal") else counted

    def rate(self, node: fx.Node, flops: float) -> float:
        """FLOPs a second of a product or an attention."""
        rates = self.cluster.rates
        if kernel_of(node):
            behind = is_backward(node)
            keys = next(tensors(self.avals.values[node.args[2 if behind else 1]])).layout
            return (rates.attention_backward if behind else rates.attention).at(keys.shape[-2])
        if node.target in GROUPED:
            return rates.grouped.at(flops / groups(node, self.avals))
        first = next(tensors(self.avals.values[node.all_input_nodes[0]])).layout
        kind = torch.float8_e4m3fn if first.dtype.is_floating_point and first.dtype.itemsize == 1 else first.dtype
        if kind not in rates.products:
            raise ir.CompileError("predict", node, f"computes in {first.dtype}, for which the cluster states no rate")
        return rates.products[kind].at(flops)

    def transfer(self, kernel: Kernel) -> tuple[str, int, Reach]:
        """The kind of a collective, the bytes that a rank sends, and where its axis lies."""
        (node,) = kernel.nodes
        kind, axis = kind_of(node), axis_of(node)
        assert kind is not None and axis is not None
        sent = SENT[kind](payload_bytes(node, self.avals), self.program.mesh[axis])
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


def groups(node: fx.Node, avals: Avals) -> int:
    """How many matrices a grouped product has."""
    held = avals.values[node if node.target is routed.grouped_outer else node.args[1]]
    return next(tensors(held)).layout.shape[0]
