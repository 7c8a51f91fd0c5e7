"""Let microbatches of one program take turns: while values of one travel, another is computed.

    products of x                    products of x
    start reduction of y             start reduction of y
    wait, norm                       products of x_1
    products of z                    start reduction of y_1
    products of x_1                  wait, norm
    start reduction of y_1           products of z
    wait, norm                       start reduction of ..., wait, norm
    products of z_1                  products of z_1

A turn is some products and ends before a microbatch waits for what it has sent in it, or, where it sends nothing, with
the layer. Collectives that are short beside the longest are waited for at once; those that could start stand before
the turn's end, for behind long ones of the other microbatch they would be late. What all microbatches read stands
before the first of them that needs it, and what is made of all, as sums of their gradients, after the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from passes.communication.batch_overlap import is_own
from passes.communication.layer_starts import kernels_of
from passes.cost.accounting import sent_bytes
from passes.cost.fusion import WAITS
from passes.program import ir
from passes.program.abstract_eval import recorded
from passes.program.bodies import base_of
from passes.program.operators import SHAPED, is_mutable, kind_of, name_of, started
from passes.program.stages import Stage

SHORT = 8  # of the bytes of the longest collective, one part is still long


@dataclass(frozen=True)
class TakeTurns(ir.Pass):
    """Alternate between the microbatches of a program, where it has several."""

    name = "take_turns"
    takes = (Stage.EXPLICIT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        stretches = [list(run) for phase, run in groupby(program.calls(), ir.phase) if phase != "optimizer"]
        turns = 0
        microbatches, sizes = microbatches_of(program), recorded()
        sent = {node: sent_bytes(node, sizes, program.mesh) for node in program.calls() if kind_of(node)}
        kernels = kernels_of(program)
        for nodes in stretches:
            scheduler = Scheduler(nodes, microbatches, sent, kernels)
            turns += scheduler.run()
            place_after(nodes[0].prev, scheduler.order)
        program.module.recompile()
        return program, ir.Report({"turns": turns})


def microbatches_of(program: ir.Program) -> dict[fx.Node, frozenset[int]]:
    """The numbers of the microbatches that each node is made of, in the forward of that which it is for.

    There one reads buffers as another has left them.
    """
    found = {
        node: frozenset([given.microbatch] if is_own(given) else [])
        for node, given in zip(program.placeholders(), program.inputs, strict=True)
    }
    for node in program.calls():
        read = () if name_of(node) in SHAPED else node.all_input_nodes
        found[node] = frozenset[int]().union(*(found[operand] for operand in read))
        number = ir.record(node).microbatch
        if found[node] and number is not None and (ir.phase(node) == "forward" or ir.is_recomputed(node)):
            found[node] = frozenset([number])
    return found


def place_after(node: fx.Node, order: list[fx.Node]) -> None:
    """Let nodes stand in this order after a node."""
    for new in order:
        node.append(new)
        node = new


class Scheduler:
    """Puts nodes that stand in a row into another `order`."""

    def __init__(
        self,
        nodes: list[fx.Node],
        microbatches: Mapping[fx.Node, frozenset[int]],
        sent_bytes: Mapping[fx.Node, int],
        kernels: Container[fx.Node],
    ):
        self.kernels = kernels
        self.nodes, self.order, self.done = nodes, list[fx.Node](), set[fx.Node]()
        self.needs = needs_of(nodes)
        self.queues: dict[int, list[fx.Node]] = defaultdict(list)
        self.missing = dict[fx.Node, int]()  # of what all microbatches make
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            if len(microbatches[node]) == 1:
                (number,) = microbatches[node]
                self.queues[number].append(node)
            elif microbatches[node]:
                self.missing[node] = len(self.needs[node])
                for needed in self.needs[node]:
                    self.users[needed].append(node)
        own = {node: sent_bytes[node] for queue in self.queues.values() for node in queue if kind_of(node)}
        self.long = {node for node, size in own.items() if SHORT * size >= max(own.values())}

    def run(self) -> int:
        """Order the nodes; returns the number of turns."""
        turns = [self.turns(queue) for queue in self.queues.values()]
        taken = 0
        while turns:
            for turn in list(turns):
                if next(turn, None) is None:
                    turns.remove(turn)
                taken += 1
        for node in self.nodes:
            self.put(node)
        return taken

    def turns(self, queue: list[fx.Node]) -> Iterator[fx.Node]:
        """Put the nodes of a microbatch, in turns."""
        sent, silent, worked, layer = set[fx.Node](), True, False, ir.layer(queue[0])
        for i, node in enumerate(queue):
            if node.target in WAITS and started(node) in sent and worked:
                self.send_more(queue[i:])
                yield node
                sent, silent, worked = set(), False, False
            if (here := ir.layer(node)) != layer:
                if silent:
                    yield node
                layer, silent = here, True
            self.put(node)
            worked |= node in self.kernels
            if node in self.long:
                sent.add(node)

    def send_more(self, queue: list[fx.Node]) -> None:
        """Put collectives that can start before the wait that comes next: behind those of others they would be late."""
        held = set[fx.Node]()
        for node in queue:
            if node in self.long:
                break
            if node.target in WAITS or node in self.kernels or not held.isdisjoint(self.needs[node]):
                held.add(node)
            elif kind_of(node):
                self.put(node)

    def put(self, node: fx.Node) -> None:
        """Put a node after what it needs, and before what nothing else is missing for."""
        waiting = [node]
        while waiting:
            node = waiting[-1]
            missing = [] if node in self.done else [n for n in self.needs[node] if n not in self.done]
            waiting += reversed(missing)
            if missing:
                continue
            waiting.pop()
            if node in self.done:
                continue
            self.done.add(node)
            self.order.append(node)
            for user in self.users[node]:
                self.missing[user] -= 1
                if not self.missing[user]:
                    waiting.append(user)


def needs_of(nodes: list[fx.Node]) -> dict[fx.Node, dict[fx.Node, None]]:
    """Of nodes in a row, those that have to come before each: its operands, and of what is written who reads it."""
    inside = set(nodes)
    written = {base_of(node.args[0]) for node in nodes if is_mutable(node)}  # type: ignore[arg-type]
    read: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # since it was written last, by whom
    found = {}
    for node in nodes:
        needs = {operand: None for operand in node.all_input_nodes if operand in inside}
        bases = {base for base in map(base_of, node.all_input_nodes) if base in written}
        writes = base_of(node.args[0]) if is_mutable(node) else None  # type: ignore[arg-type]
        for base in bases:
            if base is writes:
                needs |= dict.fromkeys(read[base])
                read[base] = []
            elif read[base] and is_mutable(read[base][0]):
                needs[read[base][0]] = None
            read[base].append(node)
        found[node] = needs
    return found
