"""The cost of a program, read from its graph: bytes on the wire, FLOPs, and the peak of live memory.

If one layer stands for several, the sums count all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes.context import operators
from passes.ir import ir
from passes.ir.folds import Fold
from passes.ir.layer import Layer
from passes.ir.mesh import Mesh
from passes.ir.operators import axis_of, kind_of, started
from passes.ops import routed
from passes.ops.host import offload
from passes.ops.linear_attention import linear_recurrence
from passes.ops.reshard import RESHARD_OPS
from passes.ops.shift import SHIFTS
from passes.torch_private import OpOverload, c10d
from passes.trace.abstract_eval import Avals, Value, map_values, tensors

aten = torch.ops.aten

# kind -> bytes that a rank sends by the ring algorithms, given its own n bytes and p ranks
SENT: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda n, p: n * (p - 1),
    "reduce_scatter": lambda n, p: n * (p - 1) // p,
    "all_reduce": lambda n, p: 2 * n * (p - 1) // p,
    "all_to_all": lambda n, p: n * (p - 1) // p,
    "shift": lambda n, p: n,
}


@dataclass(frozen=True)
class Traffic:
    """The traffic of one kind of collective over one axis in a step: `calls` calls, `sent_bytes` a rank."""

    kind: str
    axis: str
    calls: int
    sent_bytes: int


@dataclass(frozen=True)
class Accounting:
    """Costs of one rank's step: `flops` by phase, memory in bytes, and bytes `alive` by kind at `peak_node`.

    `peak_line` is the source line of `peak_node`; `recomputed_flops` are the FLOPs of the backward that repeat the
    forward.
    """

    traffic: tuple[Traffic, ...]
    flops: dict[str, int]
    recomputed_flops: int
    peak_bytes: int
    input_bytes: int
    peak_node: str
    peak_line: str
    alive: dict[str, int]


class Life(NamedTuple):
    """The lifetime of `times` equal storages: the indices of the first and last node where they are alive."""

    storage: int
    times: int
    born: int
    last: int


@dataclass(frozen=True)
class Ledger:
    """The cost of each node of a program; each table is computed once, on first use."""

    program: ir.Program
    avals: Avals

    @cached_property
    def layers(self) -> dict[fx.Node, Layer | None]:
        """The layer of each node, also of inputs."""
        inputs = dict(zip(self.program.placeholders(), self.program.inputs, strict=True))
        return {n: inputs[n].layer if n in inputs else ir.layer(n) for n in self.program.graph.nodes}

    def times(self, node: fx.Node) -> int:
        """Return the number of nodes of the full program that a node stands for."""
        return self.program.layers(self.layers[node]) if self.program.folds else 1

    @cached_property
    def flops(self) -> dict[fx.Node, int]:
        """FLOPs of each node that has any."""
        return {node: count for node in self.program.calls() if (count := count_flops(node, self.avals))}

    @cached_property
    def sends(self) -> dict[fx.Node, tuple[str, str, int]]:
        """(kind, axis, bytes that a rank sends) of each collective."""
        return dict(collectives(self.program, self.avals))

    @cached_property
    def lives(self) -> dict[int, tuple[int, int]]:
        """The indices of the first and last node at which each storage on the device is alive."""
        return lifetimes(self.program, self.avals)

    @cached_property
    def all_lives(self) -> list[Life]:
        """The lifetimes of the program's storages, and of those of layers that one layer stands for."""
        lives = [Life(s, 1, *life) for s, life in self.lives.items()]
        return lives + [life for fold in self.program.folds for life in lives_left_out(self, fold)]

    @cached_property
    def makers(self) -> dict[int, fx.Node]:
        """The first node that holds each storage."""
        makers: dict[int, fx.Node] = {}
        for node in self.avals.values:
            for s in sorted(self.avals.storages(node)):
                makers.setdefault(s, node)
        return makers

    @cached_property
    def kinds(self) -> dict[int, str]:
        """The kind of each storage."""
        return kinds_of_storages(self.program, self.avals)


def summed(ledger: Ledger) -> Accounting:
    """Return the sums of the costs of all nodes; for a local program, those of one rank."""
    flops: Counter[str] = Counter()
    for node, count in ledger.flops.items():
        flops[ir.phase(node)] += ledger.times(node) * count
    size, peak = ledger.avals.storage_bytes, peak_of(ledger)
    alive = Counter[str]()
    for s, times in peak.alive.items():
        alive[ledger.kinds[s]] += times * size[s]
    inputs = {s: ledger.times(n) for n in ledger.program.placeholders() for s in ledger.avals.storages(n)}
    return Accounting(
        traffic_of(ledger),
        dict(flops),
        sum(ledger.times(node) * count for node, count in ledger.flops.items() if ir.is_recomputed(node)),
        peak.bytes,
        sum(times * size[s] for s, times in inputs.items()),
        peak.node.name,
        ir.source(peak.node),
        dict(sorted(alive.items())),
    )


# ---- collectives --------------------------------------------------------------------------------


def collectives(program: ir.Program, avals: Avals) -> Iterator[tuple[fx.Node, tuple[str, str, int]]]:
    """Yield each collective with its kind, its axis and the bytes that a rank sends."""
    for node in program.calls():
        kind = kind_of(node)
        axis = axis_of(node) if kind is not None else None
        if kind is not None and axis is not None:
            yield node, (kind, axis, sent_bytes(node, avals, program.mesh))


def traffic_of(ledger: Ledger) -> tuple[Traffic, ...]:
    """Return the traffic by kind and axis."""
    calls: Counter[tuple[str, str]] = Counter()
    total_bytes: Counter[tuple[str, str]] = Counter()
    for node, (kind, axis, size) in ledger.sends.items():
        calls[kind, axis] += ledger.times(node)
        total_bytes[kind, axis] += ledger.times(node) * size
    return tuple(Traffic(kind, axis, calls[kind, axis], total_bytes[kind, axis]) for kind, axis in sorted(calls))


def sent_bytes(node: fx.Node, avals: Avals, mesh: Mesh) -> int:
    """Return the bytes that a rank sends in a collective."""
    kind, axis = kind_of(node), axis_of(node)
    assert kind is not None and axis is not None
    return SENT[kind](payload_bytes(node, avals), mesh[axis])


def payload_bytes(node: fx.Node, avals: Avals) -> int:
    """Return a rank's own bytes for a collective, in the dtype on the wire, padding included."""
    operands = [v.layout for v in tensors([avals.values[n] for n in node.all_input_nodes])]
    record = RESHARD_OPS.get(node.target)
    if record is not None and record.sends is not None:
        return record.sends(operands[0], record.named(node.args[1:]))
    return operands[0].size_bytes if node.target in SHIFTS else sum(layout.size_bytes for layout in operands)


# ---- FLOPs --------------------------------------------------------------------------------------


def _matmul_flops(a: tuple, b: tuple, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return 2 * math.prod(out_val) * a[-1]


def _grouped_matmul_flops(rows: tuple, weight: tuple, ends: tuple, among: float = 1.0, **named: Any) -> int:
    return int(2 * math.prod(rows) * weight[2] / among)


def _grouped_outer_flops(rows: tuple, gradient: tuple, ends: tuple, groups: int, among: float, **named: Any) -> int:
    return int(2 * math.prod(rows) * gradient[1] / among)


def _recurrence_flops(a: tuple, b: tuple, *rest: Any, **named: Any) -> int:
    return 2 * math.prod(b) * a[-1]


def _triangular_flops(system: tuple, right: tuple, **named: Any) -> int:
    return math.prod(right) * system[-1]


# operators before decomposition that neither PyTorch's registry nor an attention record has
FLOPS: dict[Any, Callable[..., int]] = {
    aten.linear: _matmul_flops,
    aten.matmul: _matmul_flops,
    aten.linalg_solve_triangular: _triangular_flops,
    linear_recurrence.overloadpacket: _recurrence_flops,
    routed.grouped_mm.overloadpacket: _grouped_matmul_flops,
    routed.grouped_outer.overloadpacket: _grouped_outer_flops,
}


def count_flops(node: fx.Node, avals: Avals) -> int:
    """Return the FLOPs of a matmul, convolution or attention (2 a multiply-add, causal ones in full); 0 for others."""
    if not isinstance(node.target, OpOverload) or (formula := formula_of(node.target)) is None:
        return 0

    def shapes(tree: Any) -> Any:
        return map_values(tree, lambda v: v.layout.shape, Value)

    args = shapes(fx.map_arg(node.args, lambda n: avals.values[n]))
    kwargs = tuple((key, shapes(avals.values[v] if isinstance(v, fx.Node) else v)) for key, v in node.kwargs.items())
    return _evaluate(formula, args, kwargs, shapes(avals.values[node]))


@functools.cache
def formula_of(op: OpOverload) -> Callable[..., int] | None:
    """Return an operator's FLOPs as a function of the shapes of its operands and its result; None if it has none."""
    return operators.formula_of(op) or FLOPS.get(op.overloadpacket) or flop_registry.get(op.overloadpacket)


@functools.lru_cache(maxsize=1 << 12)  # similar layers have the same shapes
def _evaluate(formula: Callable[..., int], args: tuple, kwargs: tuple, out: Any) -> int:
    return int(formula(*args, **dict(kwargs), out_val=out))


# ---- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The most bytes alive at once, the node of the peak, and the storages there with the number each stands for."""

    bytes: int
    node: fx.Node
    alive: Mapping[int, int]


def peak_of(ledger: Ledger, without: Collection[int] = ()) -> Peak:
    """Return the peak of live memory: inputs are alive throughout, other storages from first to last use.

    An estimate: the graph has no workspaces of kernels and no waste of the allocator. Host memory of offloaded values
    and storages of `without` are not counted.
    """
    nodes, size = list(ledger.program.graph.nodes), ledger.avals.storage_bytes
    change, lives = [0] * (len(nodes) + 1), [life for life in ledger.all_lives if life.storage not in without]
    for life in lives:
        change[life.born] += life.times * size[life.storage]
        change[life.last + 1] -= life.times * size[life.storage]
    live = list(itertools.accumulate(change[:-1]))
    at = live.index(max(live))
    alive = Counter[int]()
    for life in lives:
        if life.born <= at <= life.last:
            alive[life.storage] += life.times
    return Peak(live[at], nodes[at], alive)


def lives_left_out(ledger: Ledger, fold: Fold) -> Iterator[Life]:
    """Yield the lifetimes of the storages of layers that a layer stands for, for the time when all of them are alive.

    A tensor kept for another phase is alive in all folded layers at once, from the time when the last of them made it
    until the first is done with it. A tensor of one phase is alive in one layer at a time.
    """
    nodes, storages_by_layer = list(ledger.program.graph.nodes), dict[int | None, list[int]]()
    for storage, maker in ledger.makers.items():
        if storage in ledger.lives:
            storages_by_layer.setdefault(fold.number_of(ledger.layers[maker]), []).append(storage)
    next_number = fold.number + fold.left_out + 1  # the layer after those left out has the same tensors
    storages, other_storages = storages_by_layer.get(fold.number, []), storages_by_layer.get(next_number, [])
    if len(storages) != len(other_storages):
        message = f"{fold}, but holds {len(storages)} values and {fold.stack}.{next_number} {len(other_storages)}"
        raise ir.LayersDiffer("accounting", None, message)
    for storage, other_storage in zip(storages, other_storages, strict=True):
        (born, last), (other_born, other_last) = ledger.lives[storage], ledger.lives[other_storage]
        is_input_or_output = nodes[born].op == "placeholder" or nodes[last].op == "output"
        if is_input_or_output or ir.phase(nodes[born]) != ir.phase(nodes[last]):
            yield Life(storage, fold.left_out, max(born, other_born), min(last, other_last))


def lifetimes(program: ir.Program, avals: Avals) -> dict[int, tuple[int, int]]:
    """Return the indices of the first and last node at which each storage on the device is alive."""
    offloaded = set().union(*(avals.storages(n) for n in program.calls() if n.target is offload))
    end = len(program.graph.nodes) - 1
    lives = {s: (0, end) for node in program.placeholders() for s in avals.storages(node)}
    fixed = lives.keys() | offloaded
    for i, node in enumerate(program.graph.nodes):
        storages = avals.storages(node) if node in avals.values else frozenset[int]()
        for s in storages.union(*map(avals.storages, (*node.all_input_nodes, *operands_in_flight(node)))):
            if s not in fixed:
                lives[s] = (lives[s][0] if s in lives else i, i)
    return lives


def operands_in_flight(node: fx.Node) -> list[fx.Node]:
    """Return the operands of the collective that a wait is for; they stay in memory until then."""
    return started(node).all_input_nodes if node.target is c10d.wait_tensor.default else []


KINDS_OF_INPUT = {
    "parameter": "parameters",
    "frozen": "parameters",
    "moment": "optimizer",
    "gradient": "gradients",
    "buffer": "buffers",
    "constant": "buffers",
    "carried": "carried",
}
KINDS_BY_PHASE = {"forward": "activations", "backward": "backward", "optimizer": "update"}


def kinds_of_storages(program: ir.Program, avals: Avals) -> dict[int, str]:
    """Return the kind of each storage: parameters, optimizer (state), gradients, activations, communication, ..."""
    kind: dict[int, str] = {}
    for node, program_input in zip(program.placeholders(), program.inputs, strict=True):
        for s in avals.storages(node):
            kind[s] = KINDS_OF_INPUT.get(program_input.kind, "batch")
    gradients = gradient_storages(program, avals)
    for node in program.calls():
        for s in (s for s in avals.storages(node) if s not in kind):
            kind_of_phase = KINDS_BY_PHASE[ir.phase(node)]
            kind[s] = "communication" if kind_of(node) else "gradients" if s in gradients else kind_of_phase
    return kind


def gradient_storages(program: ir.Program, avals: Avals) -> set[int]:
    """Return the storages of the backward that the optimizer reads or that the program returns."""
    outputs = [n for n in program.graph.output_node().all_input_nodes if n.op == "call_function"]
    optimizer_inputs = [n for node in program.calls() if ir.phase(node) == "optimizer" for n in node.all_input_nodes]
    ends = [n for n in (*outputs, *optimizer_inputs) if n.op == "call_function" and ir.phase(n) == "backward"]
    return set().union(*(avals.storages(n) for n in ends)) if ends else set()
