"""The time of a step on a described cluster, read from the final graph; nothing is run.

A matmul takes its FLOPs at the rate of matmuls of its size and dtype, an attention at the rate of its length, an
elementwise kernel (`fusion.py`) the bytes that it moves. `cluster.py` has the collectives, `timeline.py` the overlap.

The program is played in the order of the last pass, which is the order that is lowered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from passes.context.operators import is_backward, kernel_of
from passes.cost.accounting import Ledger, count_flops, peak_of, sent_bytes
from passes.cost.cluster import Cluster, collective_seconds
from passes.cost.fusion import Fused, Kernel, fuse
from passes.cost.timeline import Cost, Timeline, play
from passes.ir import ir
from passes.ir.machine import Reach, between_nodes, reach, within_nodes
from passes.ir.operators import axis_of, bind, kind_of
from passes.ops import routed
from passes.trace.abstract_eval import Avals, abstract_eval, tensors

GROUPED = (routed.grouped_mm, routed.grouped_outer)


@dataclass(frozen=True)
class Prediction:
    """The timeline of a program, the bytes that a rank sends by (axis, link), and the most bytes alive at once.

    The last is without values inside kernels.
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
    """Return the prediction for one run of a program with explicit collectives.

    Operators that are not `fused` are kernels of their own. An `interpreted` program costs the host time for each
    operator, views included. Raises CompileError with the first matmul in a dtype that the cluster has no rate for.
    """
    avals = abstract_eval(program, ctx)
    costs = Prices(program, avals, cluster)
    kernels = fuse(program, avals, fused)
    rates = cluster.rates
    operators = operators_until(program, kernels) if interpreted else {}
    launch_s = (lambda kernel: rates.operator_s * operators[kernel]) if interpreted else (lambda kernel: rates.launch_s)
    timeline = play(kernels, costs.of, cluster.beside, launch_s, rates.host_computes)
    unwritten = frozenset[int]().union(*(kernel.unwritten for kernel in kernels))
    return Prediction(timeline, costs.sent(kernels), peak_of(Ledger(program, avals), without=unwritten).bytes)


def operators_until(program: ir.Program, kernels: Iterable[Kernel]) -> dict[Kernel, int]:
    """Return the operators that the host runs for each kernel: its own, and views and waits since the kernel before."""
    place = {node: i for i, node in enumerate(program.calls(), 1)}
    operators, counted_until = {}, 0
    for kernel in kernels:
        last_place = max(place[node] for node in kernel.nodes)
        operators[kernel], counted_until = max(0, last_place - counted_until), max(last_place, counted_until)
    return operators


@dataclass(frozen=True)
class Prices:
    """Seconds and bytes of the kernels of a program on a cluster."""

    program: ir.Program
    avals: Avals
    cluster: Cluster

    def of(self, kernel: Kernel) -> Cost:
        """Return the time of a kernel or a collective on its stream."""
        if kernel.kind == "collective":
            return Cost(collective_seconds(*self.transfer(kernel), self.cluster.links))
        rates = self.cluster.rates
        computing = sum(flops / self.rate(node, flops) for node in kernel.nodes if (flops := self.flops(node)))
        moving = kernel.moved_bytes / rates.memory.at(max(1, kernel.moved_bytes))
        if computing:  # measured times of matmuls include the launch
            return Cost(max(computing, moving, rates.kernel_s), is_moving=moving > computing)
        return Cost(moving + rates.kernel_s)

    def flops(self, node: fx.Node) -> float:
        """Return the FLOPs that a kernel really does: a causal attention does half of the counted ones.

        For spread experts it is those of the rank that gets most tokens, at most the capacity.
        """
        counted = count_flops(node, self.avals)
        if counted and node.target in GROUPED:
            return counted * min(self.cluster.expert_load, bind(node).get("among", 1.0))
        return counted / 2 if counted and kernel_of(node) and bind(node).get("is_causal") else counted

    def rate(self, node: fx.Node, flops: float) -> float:
        """Return the FLOP/s of a matmul or an attention."""
        rates = self.cluster.rates
        if kernel_of(node):
            in_backward = is_backward(node)
            keys = next(tensors(self.avals.values[node.args[2 if in_backward else 1]])).layout
            return (rates.attention_backward if in_backward else rates.attention).at(keys.shape[-2])
        if node.target in GROUPED:
            return rates.grouped.at(flops / groups(node, self.avals))
        first = next(tensors(self.avals.values[node.all_input_nodes[0]])).layout
        dtype = torch.float8_e4m3fn if first.dtype.is_floating_point and first.dtype.itemsize == 1 else first.dtype
        nearest = torch.bfloat16 if dtype.itemsize == 2 else torch.float32  # for float16, float64, complex
        curve = rates.products.get(dtype) or rates.products.get(nearest)
        if curve is None:
            raise ir.CompileError("predict", node, f"computes in {first.dtype}, for which the cluster states no rate")
        return curve.at(flops)

    def transfer(self, kernel: Kernel) -> tuple[str, int, Reach]:
        """Return the kind of a collective, the bytes that a rank sends, and the reach of its axis."""
        (node,) = kernel.nodes
        kind, axis = kind_of(node), axis_of(node)
        assert kind is not None and axis is not None
        mesh = self.program.mesh
        return kind, sent_bytes(node, self.avals, mesh), reach(mesh, axis, self.cluster.gpus_per_node)

    def sent(self, kernels: Iterable[Kernel]) -> dict[tuple[str, str], float]:
        """Return the bytes that a rank sends over each axis, inside its node and out of it."""
        total: Counter[tuple[str, str]] = Counter()
        for kernel in kernels:
            if kernel.kind == "collective":
                transfer, axis = self.transfer(kernel), axis_of(kernel.nodes[0])
                total[str(axis), "intra"] += within_nodes(*transfer)  # type: ignore[assignment]
                total[str(axis), "inter"] += between_nodes(*transfer)  # type: ignore[assignment]
        return dict(total)


def groups(node: fx.Node, avals: Avals) -> int:
    """Return the number of matrices of a grouped matmul."""
    weights = avals.values[node if node.target is routed.grouped_outer else node.args[1]]
    return next(tensors(weights)).layout.shape[0]
