"""What a program will cost, read from its graph: bytes on the wire, FLOPs, and the peak of live memory.

Where one layer stands for several, the sums are those of all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes.context import operators
from passes.program import ir, routed
from passes.program.abstract_eval import Avals, Value, map_values, tensors
from passes.program.folds import Fold
from passes.program.host import offload
from passes.program.mesh import Mesh
from passes.program.operators import axis_of, kind_of, started
from passes.program.reshard import RESHARD_OPS
from passes.program.shift import SHIFTS
from passes.program.torch_private import OpOverload, c10d

aten = torch.ops.aten

# kind -> bytes that a rank sends, of its own n bytes and p ranks, by the ring algorithms
SENT: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda n, p: n * (p - 1),
    "reduce_scatter": lambda n, p: n * (p - 1) // p,
    "all_reduce": lambda n, p: 2 * n * (p - 1) // p,
    "all_to_all": lambda n, p: n * (p - 1) // p,
    "shift": lambda n, p: n,
}


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective sends over one axis in a step: `sent_bytes` a rank, in `calls` calls."""

    kind: str
    axis: str
    calls: int
    sent_bytes: int


@dataclass(frozen=True)
class Accounting:
    """Costs of one rank's step: `flops` by phase; memory in bytes, by what is alive at `peak_node` (in `peak_line`).

    `recomputed_flops` are those of the backward that repeat the forward.
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
    """So many storages like one, and the nodes, by index, at which they are first and last alive."""

    storage: int
    times: int
    born: int
    last: int


@dataclass(frozen=True)
class Ledger:
    """What each node of a program costs, for sums and for rows by node: each is found once, when first asked for."""

    program: ir.Program
    avals: Avals

    @cached_property
    def layers(self) -> dict[fx.Node, int | None]:
        """The number of the layer of each node, in the stack in which one layer stands for others."""
        fold = self.program.fold
        assert fold is not None
        inputs = dict(zip(self.program.placeholders(), self.program.inputs, strict=True))
        layers = {n: inputs[n].layer if n in inputs else ir.layer(n) for n in self.program.graph.nodes}
        return {node: fold.number_of(layer) for node, layer in layers.items()}

    def times(self, node: fx.Node) -> int:
        """For how many nodes of the whole program a node stands."""
        fold = self.program.fold
        return 1 + fold.left_out if fold and self.layers[node] == fold.number else 1

    @cached_property
    def flops(self) -> dict[fx.Node, int]:
        """FLOPs, of nodes that have any."""
        return {node: count for node in self.program.calls() if (count := count_flops(node, self.avals))}

    @cached_property
    def sends(self) -> dict[fx.Node, tuple[str, str, int]]:
        """(kind, axis, bytes that a rank sends) of collectives."""
        return dict(collectives(self.program, self.avals))

    @cached_property
    def lives(self) -> dict[int, tuple[int, int]]:
        """The first and the last node, by index, at which each storage on the device is alive."""
        return lifetimes(self.program, self.avals)

    @cached_property
    def all_lives(self) -> list[Life]:
        """The lives of the program's storages, and of those of layers that one stands for."""
        own = [Life(s, 1, *life) for s, life in self.lives.items()]
        return own if self.program.fold is None else [*own, *lives_left_out(self, self.program.fold)]

    @cached_property
    def makers(self) -> dict[int, fx.Node]:
        """The first node that holds each storage."""
        found: dict[int, fx.Node] = {}
        for node in self.avals.values:
            for s in sorted(self.avals.storages(node)):
                found.setdefault(s, node)
        return found

    @cached_property
    def kinds(self) -> dict[int, str]:
        """What each storage holds."""
        return kinds_of_storages(self.program, self.avals)


def account(program: ir.Program, avals: Avals) -> Accounting:
    """The program's costs; once it is local, those of one rank."""
    return summed(Ledger(program, avals))


def summed(ledger: Ledger) -> Accounting:
    """The sums of what nodes cost."""
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
    """Each collective with its kind, its axis and the bytes that a rank sends."""
    for node in program.calls():
        kind = kind_of(node)
        axis = axis_of(node) if kind is not None else None
        if kind is not None and axis is not None:
            yield node, (kind, axis, sent_bytes(node, avals, program.mesh))


def count_traffic(program: ir.Program, avals: Avals) -> tuple[Traffic, ...]:
    """Collectives by kind and axis."""
    return traffic_of(Ledger(program, avals))


def traffic_of(ledger: Ledger) -> tuple[Traffic, ...]:
    """Collectives by kind and axis."""
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for node, (kind, axis, size) in ledger.sends.items():
        calls[kind, axis] += ledger.times(node)
        sent[kind, axis] += ledger.times(node) * size
    return tuple(Traffic(kind, axis, calls[kind, axis], sent[kind, axis]) for kind, axis in sorted(calls))


def sent_bytes(node: fx.Node, avals: Avals, mesh: Mesh) -> int:
    """Bytes that a rank sends in a collective."""
    kind, axis = kind_of(node), axis_of(node)
    assert kind is not None and axis is not None
    return SENT[kind](payload_bytes(node, avals), mesh[axis])


def payload_bytes(node: fx.Node, avals: Avals) -> int:
    """Bytes that a rank brings to a collective, in the dtype that travels, padding included."""
    operands = [v.layout for v in tensors([avals.values[n] for n in node.all_input_nodes])]
    record = RESHARD_OPS.get(node.target)
    if record is not None and record.sends is not None:
        return record.sends(operands[0], record.named(node.args[1:]))
    return operands[0].size_bytes if node.target in SHIFTS else sum(layout.size_bytes for layout in operands)


# ---- FLOPs --------------------------------------------------------------------------------------


def _product(a: tuple, b: tuple, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return 2 * math.prod(out_val) * a[-1]


def _grouped_product(rows: tuple, weight: tuple, ends: tuple, among: float = 1.0, **named: Any) -> int:
    return int(2 * math.prod(rows) * weight[2] / among)


def _grouped_outer(rows: tuple, gradient: tuple, ends: tuple, groups: int, among: float, **named: Any) -> int:
    return int(2 * math.prod(rows) * gradient[1] / among)


# what neither PyTorch's registry has nor a record of attention, of operators before they are decomposed
FLOPS: dict[Any, Callable[..., int]] = {
    aten.linear: _product,
    aten.matmul: _product,
    routed.grouped_mm.overloadpacket: _grouped_product,
    routed.grouped_outer.overloadpacket: _grouped_outer,
}


def count_flops(node: fx.Node, avals: Avals) -> int:
    """FLOPs of a matrix product, convolution or attention (2 a multiply-add, causal ones in full); 0 of others."""
    if not isinstance(node.target, OpOverload) or (formula := formula_of(node.target)) is None:
        return 0

    def shapes(tree: Any) -> Any:
        return map_values(tree, lambda v: v.layout.shape, Value)

    args = shapes(fx.map_arg(node.args, lambda n: avals.values[n]))
    kwargs = tuple((key, shapes(avals.values[v] if isinstance(v, fx.Node) else v)) for key, v in node.kwargs.items())
    return _evaluate(formula, args, kwargs, shapes(avals.values[node]))


@functools.cache
def formula_of(op: OpOverload) -> Callable[..., int] | None:
    """The FLOPs of an operator as a function of its operands' and its result's shapes, or None if it has none."""
    return operators.formula_of(op) or FLOPS.get(op.overloadpacket) or flop_registry.get(op.overloadpacket)


@functools.lru_cache(maxsize=1 << 12)  # layers alike have the same shapes
def _evaluate(formula: Callable[..., int], args: tuple, kwargs: tuple, out: Any) -> int:
    return int(formula(*args, **dict(kwargs), out_val=out))


# ---- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """Most bytes alive at once, the node at which they are, and their storages, each with how many it stands for."""

    bytes: int
    node: fx.Node
    alive: Mapping[int, int]


def peak_memory(program: ir.Program, avals: Avals) -> Peak:
    """Where most memory is alive: inputs live throughout, the rest from birth to last use.

    An estimate: memory that a kernel uses inside, and what an allocator wastes, is not in the graph; nor is host memory
    that values are offloaded to counted.
    """
    return peak_of(Ledger(program, avals))


def peak_of(ledger: Ledger) -> Peak:
    """Where most memory is alive."""
    nodes, size = list(ledger.program.graph.nodes), ledger.avals.storage_bytes
    change = [0] * (len(nodes) + 1)
    for life in ledger.all_lives:
        change[life.born] += life.times * size[life.storage]
        change[life.last + 1] -= life.times * size[life.storage]
    live = list(itertools.accumulate(change[:-1]))
    at = live.index(max(live))
    alive = Counter[int]()
    for life in ledger.all_lives:
        if life.born <= at <= life.last:
            alive[life.storage] += life.times
    return Peak(live[at], nodes[at], alive)


def lives_left_out(ledger: Ledger, fold: Fold) -> Iterator[Life]:
    """The storages of the layers that one stands for, while all of them are alive.

    A tensor kept for another phase is alive in all folded layers at once, from when the last of them made it until the
    first is done with it; a tensor of one phase, in one layer at a time.
    """
    nodes, made = list(ledger.program.graph.nodes), dict[int | None, list[int]]()
    for s, maker in ledger.makers.items():
        if s in ledger.lives:
            made.setdefault(ledger.layers[maker], []).append(s)
    following = fold.number + fold.left_out + 1  # beyond those left out: what all of them have, it has as well
    own, others = made.get(fold.number, []), made.get(following, [])
    if len(own) != len(others):
        message = f"{fold}, but holds {len(own)} values and {fold.stack}.{following} {len(others)}"
        raise ir.LayersDiffer("accounting", None, message)
    for s, other in zip(own, others, strict=True):
        (born, last), (other_born, other_last) = ledger.lives[s], ledger.lives[other]
        stays = nodes[born].op == "placeholder" or nodes[last].op == "output"
        if stays or ir.phase(nodes[born]) != ir.phase(nodes[last]):
            yield Life(s, fold.left_out, max(born, other_born), min(last, other_last))


def lifetimes(program: ir.Program, avals: Avals) -> dict[int, tuple[int, int]]:
    """The first and the last node, by index, at which each storage on the device is alive."""
    hosted = set().union(*(avals.storages(n) for n in program.calls() if n.target is offload))
    end = len(program.graph.nodes) - 1
    lives = {s: (0, end) for node in program.placeholders() for s in avals.storages(node)}
    given = lives.keys() | hosted
    for i, node in enumerate(program.graph.nodes):
        yielded = avals.storages(node) if node in avals.values else frozenset[int]()
        for s in yielded.union(*map(avals.storages, (*node.all_input_nodes, *sent(node)))):
            if s not in given:
                lives[s] = (lives[s][0] if s in lives else i, i)
    return lives


def sent(node: fx.Node) -> list[fx.Node]:
    """What the collective that a wait is for sends: that stays in memory until then."""
    return started(node).all_input_nodes if node.target is c10d.wait_tensor.default else []


KINDS_OF_INPUT = {
    "parameter": "parameters",
    "moment": "optimizer",
    "gradient": "gradients",
    "buffer": "buffers",
    "constant": "buffers",
    "carried": "carried",
}
KINDS_BY_PHASE = {"forward": "activations", "backward": "backward", "optimizer": "update"}


def kinds_of_storages(program: ir.Program, avals: Avals) -> dict[int, str]:
    """What each storage holds: parameters, optimizer (state), gradients, activations, communication, ..."""
    kind: dict[int, str] = {}
    for node, given in zip(program.placeholders(), program.inputs, strict=True):
        for s in avals.storages(node):
            kind[s] = KINDS_OF_INPUT.get(given.kind, "batch")
    gradients = gradient_storages(program, avals)
    for node in program.calls():
        for s in (s for s in avals.storages(node) if s not in kind):
            own = KINDS_BY_PHASE[ir.phase(node)]
            kind[s] = "communication" if kind_of(node) else "gradients" if s in gradients else own
    return kind


def gradient_storages(program: ir.Program, avals: Avals) -> set[int]:
    """Storages of the backward that the optimizer reads or that leave the program."""
    leaving = [n for n in program.graph.output_node().all_input_nodes if n.op == "call_function"]
    read = [n for node in program.calls() if ir.phase(node) == "optimizer" for n in node.all_input_nodes]
    ends = [n for n in (*leaving, *read) if n.op == "call_function" and ir.phase(n) == "backward"]
    return set().union(*(avals.storages(n) for n in ends)) if ends else set()
