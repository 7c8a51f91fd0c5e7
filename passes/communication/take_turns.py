"""Let microbatches of one program take turns: while values of one travel, another is computed.

    matmuls of x                     matmuls of x
    start reduction of y             start reduction of y
    wait, norm                       matmuls of x_1
    matmuls of z                     start reduction of y_1
    matmuls of x_1                   wait, norm
    start reduction of y_1           matmuls of z
    wait, norm                       start reduction of ..., wait, norm
    matmuls of z_1                   matmuls of z_1

A turn ends before the first wait for a long collective that the microbatch started in it, if the turn has a kernel. If
there is no such collective, it ends with the layer. A collective is long if it sends at least an eighth of the bytes of
the longest. Short ones are waited for at once. Those that can start before the turn's end do so: after the long ones of
the other microbatch they would be late. Operands shared by all microbatches stand before the first node that needs
them, and operators on values of all microbatches, such as sums of gradients, after the last of these values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest

from torch import fx

from passes.communication.batch_overlap import has_copies
from passes.communication.layer_starts import kernels_of
from passes.communication.node_order import between, in_flight, put_in_order
from passes.cost.accounting import sent_bytes
from passes.cost.fusion import WAITS
from passes.ir import ir
from passes.ir.bodies import base_of
from passes.ir.operators import SHAPED, is_mutable, kind_of, name_of, started
from passes.ir.stages import Stage
from passes.trace.abstract_eval import recorded

SHORT = 8  # a collective is long if it sends at least 1/SHORT of the longest one's bytes

Needs = Mapping[fx.Node, Mapping[fx.Node, None]]  # node -> the nodes that must come before it, in order


@dataclass(frozen=True)
class TakeTurns(ir.Pass):
    """Alternate between the microbatches of a program, if it has several."""

    name = "take_turns"
    takes = (Stage.EXPLICIT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program, order, count = program.copy(), list[fx.Node](), 0
        microbatches, kernels, sizes = microbatches_of(program), kernels_of(program), recorded()
        sent = {node: sent_bytes(node, sizes, program.mesh) for node in program.calls() if kind_of(node)}
        for phase, run in groupby(program.calls(), ir.phase):
            nodes = list(run)
            if phase != "optimizer":
                needs, combined = needs_of(nodes), {node for node in nodes if len(microbatches[node]) > 1}
                turns = turns_of_all(nodes, microbatches, sent, kernels, needs)
                nodes, count = merge_turns(nodes, turns, needs, combined), count + len(turns)
            order += nodes
        put_in_order(order)
        program.module.recompile()
        effect = effect_of(program, microbatches, sent, kernels)
        return program, ir.Report({"turns": count}, effects=(effect,) if program.mesh.world_size > 1 else ())


def effect_of(
    program: ir.Program,
    microbatches: Mapping[fx.Node, frozenset[int]],
    sent: Mapping[fx.Node, int],
    kernels: Container[fx.Node],
) -> ir.Effect:
    """Return the bytes that microbatches send while another one is computed, of all bytes that they send."""
    done, total = 0, 0
    for start, wait in in_flight(program.graph.nodes):
        if len(microbatches[start]) == 1:
            size_bytes = program.times(start) * sent[start]
            others = (n for n in between(start, wait) if n in kernels and microbatches[n] != microbatches[start])
            total, done = total + size_bytes, done + size_bytes * any(microbatches[n] for n in others)
    things, unmet = "bytes sent while another microbatch is computed", "microbatches send nothing; set it to 1"
    return ir.Effect("passes.communication.batch_overlap", done, things, total, unmet=unmet)


def microbatches_of(program: ir.Program) -> dict[fx.Node, frozenset[int]]:
    """Return the microbatches on which each node depends; in the forward, the one to which it belongs.

    In the forward a node may also depend on others, through buffers that they changed.
    """
    numbers = {
        node: frozenset([item.microbatch] if has_copies(item) else [])
        for node, item in zip(program.placeholders(), program.inputs, strict=True)
    }
    for node in program.calls():
        read = () if name_of(node) in SHAPED else node.all_input_nodes
        numbers[node] = frozenset[int]().union(*(numbers[operand] for operand in read))
        number = ir.record(node).microbatch
        if numbers[node] and number is not None and (ir.phase(node) == "forward" or ir.is_recomputed(node)):
            numbers[node] = frozenset([number])
    return numbers


# ---- turns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Nodes of one microbatch that run without a turn of another in between."""

    nodes: tuple[fx.Node, ...]


def turns_of_all(
    nodes: Iterable[fx.Node],
    microbatches: Mapping[fx.Node, frozenset[int]],
    sent_bytes: Mapping[fx.Node, int],
    kernels: Container[fx.Node],
    needs: Needs,
) -> list[Turn]:
    """Return the turns of all microbatches, alternating between them."""
    queues: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if len(microbatches[node]) == 1:
            queues[min(microbatches[node])].append(node)
    sizes = {node: sent_bytes[node] for queue in queues.values() for node in queue if kind_of(node)}
    long = {node for node, size in sizes.items() if SHORT * size >= max(sizes.values())}
    rounds = zip_longest(*(turns_of(queue, long, kernels, needs) for queue in queues.values()))
    return [turn for turns in rounds for turn in turns if turn]


def turns_of(queue: list[fx.Node], long: set[fx.Node], kernels: Container[fx.Node], needs: Needs) -> Iterator[Turn]:
    """Yield the turns of a microbatch."""
    nodes, waited, layer = list[fx.Node](), False, ir.layer(queue[0])  # waited: a turn of the layer ended with a wait
    for i, node in enumerate(queue):
        if node.target in WAITS and started(node) in long.intersection(nodes) and any(n in kernels for n in nodes):
            yield Turn((*nodes, *early_starts(queue[i:], long, kernels, needs)))
            nodes, waited = [], True
        if (next_layer := ir.layer(node)) != layer:
            if not waited:
                yield Turn(tuple(nodes))
                nodes = []
            layer, waited = next_layer, False
        nodes.append(node)
    yield Turn(tuple(nodes))


def early_starts(
    queue: list[fx.Node], long: set[fx.Node], kernels: Container[fx.Node], needs: Needs
) -> Iterator[fx.Node]:
    """Yield the short collectives after a wait that need neither this wait nor a kernel after it."""
    late = set[fx.Node]()
    for node in queue:
        if node in long:
            return
        if node.target in WAITS or node in kernels or not late.isdisjoint(needs[node]):
            late.add(node)
        elif kind_of(node):
            yield node


def merge_turns(nodes: list[fx.Node], turns: list[Turn], needs: Needs, combined: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes in the order of the turns, each after its needs, `combined` ones right after theirs."""
    order, missing = dict[fx.Node, None](), {node: len(needs[node]) for node in combined}
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in (n for n in nodes if n in combined):
        for needed in needs[node]:
            users[needed].append(node)
    for wanted in (*(node for turn in turns for node in turn.nodes), *nodes):
        waiting = [wanted]  # an explicit stack, because chains are as long as programs
        while waiting:
            node = waiting[-1]
            if node not in order and (first := [n for n in needs[node] if n not in order]):
                waiting += reversed(first)
                continue
            waiting.pop()
            if node in order:
                continue
            order[node] = None
            for user in users[node]:
                missing[user] -= 1
                if not missing[user]:
                    waiting.append(user)
    return list(order)


def needs_of(nodes: list[fx.Node]) -> dict[fx.Node, dict[fx.Node, None]]:
    """Return the nodes of a run that come before each of them: its operands, and readers and writers of its memory."""
    inside = set(nodes)
    written = {base_of(node.args[0]) for node in nodes if is_mutable(node)}  # type: ignore[arg-type]
    read: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # last write, and reads since, by memory
    all_needs = {}
    for node in nodes:
        needs = {operand: None for operand in node.all_input_nodes if operand in inside}
        bases = [base for base in dict.fromkeys(map(base_of, node.all_input_nodes)) if base in written]
        writes = base_of(node.args[0]) if is_mutable(node) else None  # type: ignore[arg-type]
        for base in bases:
            if base is writes:
                needs |= dict.fromkeys(read[base])
                read[base] = []
            elif read[base] and is_mutable(read[base][0]):
                needs[read[base][0]] = None
            read[base].append(node)
        all_needs[node] = needs
    return all_needs
