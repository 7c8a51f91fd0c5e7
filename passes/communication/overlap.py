"""Run collectives next to computation: start them early, and wait for them late.

    start gather of layer 1          forward: the weights of the next layer travel while this one is computed
    wait for gather of layer 0
    matmuls of layer 0

    start reduce-scatter of layer 1  backward: gradients travel while the layer before is computed,
    matmuls of layer 0               and are waited for when its own are to be sent
    wait for layer 1, start layer 0

    gradient of the input            backward, tensor parallel: the gradient of the weight, for which nothing waits,
    start reduce-scatter of it       is computed while the gradient of the input travels
    gradient of the weight
    wait

- Gathers of parameters start when the layer `prefetch` places before the one that uses them begins.
- Gradients are sent when the kernel ends that makes the last of them.
- A wait stands right before the operator that needs its result, and so do views and copies of that result. Gradients
  are waited for `prefetch` layers later at the latest: until then the sent tensor stays in memory. If the result is
  reduced over a second axis, its wait may come that much later again.
- A collective should have matmuls next to it that take as long as it does (`Balance`). It starts before matmuls that it
  does not need, as when activations are gathered again, or rows of experts travel in chunks. If that is not enough, in
  the backward, matmuls of weight gradients move from before its start to after it. Then it is waited for after matmuls
  that do not need it, such as those of shared experts. All of these are in its layer, or the one before. A `Clock`
  tells how much is missing: earlier collectives of a communicator go first.

Only the order changes: operators and results stay the same, to the bit. Each operator records its role for the layers
(`Role` in `passes/ir/layer.py`). Collectives of a communicator have one order on all ranks, because all ranks run
one program.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile

from torch import fx

from passes.communication.bucket import writes_input
from passes.communication.layer_starts import (
    Place,
    after_waits,
    begins_of,
    gradient_tails,
    kernels_of,
    leaves,
    matmuls_of,
    place_of,
    roles_of,
)
from passes.communication.node_order import after, before, between, in_flight, last_matmuls
from passes.cost.accounting import sent_bytes
from passes.cost.clock import COMPUTE, Clock
from passes.cost.fusion import WAITS
from passes.ir import ir
from passes.ir.bodies import base_of
from passes.ir.machine import H100, Balance
from passes.ir.operators import axis_of, communicator_of, is_mutable, kind_of, started
from passes.ir.slices import reach, weight_nodes
from passes.ir.stages import Stage
from passes.trace.abstract_eval import recorded
from passes.trace.editor import move_after, move_before

COUNTS = ("collectives", "with_products_beside_before", "with_products_beside_after")


@dataclass(frozen=True)
class Overlap(ir.Pass):
    """Start gathers of parameters `prefetch` layers early, and wait for gradients as late; 0 leaves the order as it is.

    The `balance` of a machine gives the amount of computation that hides a collective.
    """

    prefetch: int = 1
    balance: Balance = H100
    name = "overlap"
    takes = (Stage.EXPLICIT,)
    gives = Stage.ORDERED
    keeps = True
    after = ("communicators",)  # collectives of one communicator are sent one after another

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        matmuls, starts = matmuls_of(program.graph), {wait: start for start, wait in in_flight(program.graph.nodes)}
        already = len(last_matmuls(program.graph, matmuls))
        if self.prefetch and starts:
            travel = {start: self.travel_flops(start, program) for start in starts.values()}
            overlap(program, self.prefetch, matmuls, travel)
        for node, role, _ in roles_of(program, kernels_of(program)):
            ir.update(node, role=role)
        program.module.recompile()
        hidden = last_matmuls(program.graph, matmuls)
        counts = len(starts), already, len(hidden)
        effects = [self.effect(program, starts, hidden)] if starts else []
        return program, ir.Report(dict(zip(COUNTS, counts)), effects=tuple(effects))

    def effect(self, program: ir.Program, starts: Mapping[fx.Node, fx.Node], hidden: Container[fx.Node]) -> ir.Effect:
        """Return the effect, given collectives by wait, and the waits between which and the starts are matmuls."""
        sent = {wait: program.times(s) * sent_bytes(s, recorded(), program.mesh) for wait, s in starts.items()}
        done = sum(size for wait, size in sent.items() if wait in hidden)
        unmet = "no matmul can run during a collective; set it to 0" if self.prefetch else ""
        things = "bytes sent during matmuls"
        return ir.Effect("passes.communication.prefetch", done, things, sum(sent.values()), unmet=unmet)

    def travel_flops(self, start: fx.Node, program: ir.Program) -> int:
        """Return the FLOPs that take as long as a collective; an integer, so that equal sums are equal."""
        kind, axis, mesh = kind_of(start), axis_of(start), program.mesh
        assert kind is not None and axis is not None
        return math.ceil(self.balance.flops(kind, sent_bytes(start, recorded(), mesh), mesh, axis))


def overlap(
    program: ir.Program, prefetch: int, matmuls: Mapping[fx.Node, int], travel: Mapping[fx.Node, int]
) -> None:
    """Let collectives run next to computation, by the durations of matmuls and collectives; changes the graph."""
    kernels = kernels_of(program)
    tails, begins = gradient_tails(program, kernels), begins_of(program, kernels)
    wait_late(program, prefetch, tails, kernels.union(begins))
    start_early(program, prefetch, begins)
    Filler(program.graph, matmuls, travel, tails, tails.union(weight_nodes(program))).fill()


# ---- early starts, late waits -----------------------------------------------------------------------


def start_early(program: ir.Program, prefetch: int, begins: Mapping[fx.Node, Place]) -> None:
    """Start a layer's gathers when the layer `prefetch` places before it begins, and their maxima one layer earlier."""
    weights = set(weight_nodes(program))
    unwritten = takewhile(lambda node: not writes_input(node), program.calls())
    early = [node for node in unwritten if node in weights and kind_of(node) in ("all_gather", "all_reduce")]
    gathers = [node for node in early if kind_of(node) == "all_gather"]
    runs = [(place, list(run)) for place, run in groupby(gathers, place_of)]
    first = {place: node for node, place in begins.items() if place[1]}
    targets = [first.get(place) or next(after(run[0])) for place, run in runs]
    number = {place: i for i, (place, _) in enumerate(runs) if place[1]}
    for i, (_, run) in enumerate(runs):
        for start in run:
            move_before(start, targets[max(0, i - prefetch)])
    for start in early:
        place = place_of(start)
        if kind_of(start) == "all_reduce" and place in number:
            move_before(start, targets[max(0, number[place] - prefetch - 1)])


def wait_late(program: ir.Program, prefetch: int, tails: set[fx.Node], ends: set[fx.Node]) -> None:
    """Put waits, and views and copies of their results, right before their users; send gradients at a kernel's end."""
    following = after_waits(program, tails)
    sending = {node for node in tails - following if kind_of(node)}
    latest = latest_places(program, prefetch, sending, following)
    stops = ends.union(sending, (n for n in following - tails if n.target in WAITS))
    end, written = program.graph.output_node(), dict[fx.Node, fx.Node]()  # written: input -> its first write
    for node in reversed([*program.calls()]):
        if is_mutable(node):
            written[node.args[0]] = node  # type: ignore[index]
        if node in sending and (stop := next((n for n in after(node) if n in stops), None)):
            min(stop, *node.users).prepend(node)
        if node in following:
            sent = started(node).all_input_nodes if node.target in WAITS else ()
            barriers = (written[n] for n in map(base_of, sent) if n in written)  # a tensor in flight must not change
            min(end, latest.get(node, end), *barriers, *node.users).prepend(node)


def latest_places(
    program: ir.Program, prefetch: int, sending: set[fx.Node], following: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the collective before which gradients are waited for: the first one `prefetch` layers later.

    A gradient that is reduced over one axis after another is sent on there, and waited for that much later again.
    """
    sends = [node for node in program.calls() if node in sending]
    runs = [list(run) for _, run in groupby(sends, ir.layer)]
    due = {start: i for i, run in enumerate(runs) for start in run}  # index of the run before which it is waited for
    latest = {}
    for node in program.calls():
        due_runs = [due[operand] for operand in node.all_input_nodes if operand in due]
        if node in following and due_runs:
            due[node] = max(due_runs) + (prefetch if node.target in WAITS else 0)
            if (node.target in WAITS or kind_of(node)) and due[node] < len(runs):
                latest[node] = runs[due[node]][0]
    return latest


# ---- matmuls next to collectives --------------------------------------------------------------------


@dataclass
class Filler:
    """Moves nodes of a graph until collectives have enough matmuls next to them to hide them.

    `matmuls` and `travel` are durations. Gradients in `tails` and weights are `placed` already.
    """

    graph: fx.Graph
    matmuls: Mapping[fx.Node, int]
    travel: Mapping[fx.Node, int]
    tails: set[fx.Node]
    placed: Container[fx.Node]

    def fill(self) -> None:
        """Move collectives and matmuls, for one wait after another."""
        self.pairs = list(in_flight(self.graph.nodes))
        self.started = {wait: start for start, wait in self.pairs}
        self.timed = [n for n in self.graph.nodes if n in self.matmuls or n in self.travel or n in self.started]
        self.hiding = set[fx.Node]()  # matmuls that hide a collective
        for start, wait in self.pairs:
            if ir.phase(start) == "optimizer" or start in self.placed:
                continue
            self.hiding.update(node for node in between(start, wait) if node in self.matmuls)
            if self.wait_time(start, wait) > 0:
                nearby = self.matmuls_before(start)
                self.start_earlier(start, wait, nearby)
                self.compute_later(start, wait, nearby)
                self.wait_later(start, wait)

    def clock_at(self, wait: fx.Node) -> Clock:
        """Return the clock when kernels reach a wait; collectives of a communicator travel one after another."""
        clock = Clock()
        self.timed.sort()
        for node in takewhile(lambda node: node is not wait, self.timed):
            if node in self.matmuls:
                clock.run(node, COMPUTE, self.matmuls[node])
            elif node in self.travel:
                clock.run(node, communicator_of(node), self.travel[node], after=clock.now())
            else:
                clock.wait(clock.end(self.started[node]))
        return clock

    def wait_time(self, start: fx.Node, wait: fx.Node) -> float:
        """Return how long kernels wait for a collective."""
        clock = self.clock_at(wait)
        return clock.end(start) - clock.now()

    def start_earlier(self, start: fx.Node, wait: fx.Node, nearby: list[fx.Node]) -> None:
        """Start a collective before matmuls that it does not need."""
        if passed := self.matmuls_to_pass(start, wait, nearby):
            move_before(start, passed[-1])
            self.hiding.update(passed)

    def compute_later(self, start: fx.Node, wait: fx.Node, nearby: list[fx.Node]) -> None:
        """Move weight gradients, which only tails need, from before a collective to right before its wait."""
        for matmul in nearby:
            free = matmul not in self.hiding and self.can_follow(matmul, wait)
            if free and self.wait_time(start, wait) > 0:
                move_after(matmul, next(before(wait)))
                self.hiding.add(matmul)

    def wait_later(self, start: fx.Node, wait: fx.Node) -> None:
        """Wait for a collective after matmuls that do not need it."""
        for matmul in self.independent_matmuls(wait):
            # gradients of weights are left for a later collective
            free = matmul not in self.hiding and not leaves(matmul, self.tails)
            if free and self.wait_time(start, wait) > 0:
                move_after(wait, matmul)
                self.hiding.add(matmul)

    # -- choice of matmuls ------------------------------------------------------------------------

    def matmuls_before(self, start: fx.Node) -> list[fx.Node]:
        """Return the matmuls of its phase before a collective, of its layer and of one more, the nearest first.

        A collective outside of layers stays behind the first matmul outside of layers, and one of a layer is not moved
        before any of these. Otherwise the last layer would differ from the others.
        """
        nearby, layers = [], {ir.layer(start)}
        for node in before(start):
            if node in self.matmuls:
                layers.add(ir.layer(node))
                if len(layers) > 2 or len(layers) > 1 and None in layers or ir.phase(node) != ir.phase(start):
                    break
                nearby.append(node)
        return nearby if ir.layer(start) else nearby[:-1]

    def matmuls_to_pass(self, start: fx.Node, wait: fx.Node, nearby: list[fx.Node]) -> list[fx.Node]:
        """Return the `nearby` matmuls that a collective can start before, because it depends on none from there on.

        Return no more than hide it, or help: it may have to wait for its own operands, and for collectives of its
        communicator that are in flight there.
        """
        clock, communicator = self.clock_at(wait), communicator_of(start)
        needed, missing, ready = set(start.all_input_nodes), clock.end(start) - clock.now(), 0.0
        in_flight_before = {other for other, until in self.pairs if self.is_in_flight_at(other, until, start)}
        passed, helping = list[fx.Node](), 0  # all, and the number of them up to the last that helps
        for node in before(start):
            if missing <= 0 or len(passed) == len(nearby) or node in needed and (node in self.matmuls or kind_of(node)):
                break
            if is_mutable(node) and base_of(node.args[0]) in map(base_of, needed):  # type: ignore[arg-type]
                break
            if node in needed:
                needed.update(node.all_input_nodes)
                ready = max(ready, clock.end(started(node)) if node.target in WAITS else 0)
            if node.target in WAITS and communicator_of(started(node)) == communicator:
                in_flight_before.add(started(node))
            in_flight_before.discard(node)
            if node in self.matmuls:
                passed.append(node)
                now = clock.spans[node].start
                idle = max(0, ready - now)
                begins = max(now + idle, *(clock.end(other) for other in in_flight_before), 0)
                lost = idle + max(0, begins + self.travel[start] - clock.now() - idle)
                if lost < missing or lost == missing and not idle:
                    helping, missing = len(passed), lost
        return passed[:helping]

    def is_in_flight_at(self, other: fx.Node, wait: fx.Node, start: fx.Node) -> bool:
        """Return True if another collective of the same communicator is in flight when one starts."""
        return other < start < wait and communicator_of(other) == communicator_of(start)

    def can_follow(self, matmul: fx.Node, wait: fx.Node) -> bool:
        """Return True if only tails need a matmul, and none of them is a wait before `wait`."""
        following = reach([matmul], lambda node: [user for user in node.users if user < wait])
        return leaves(matmul, self.tails) and not any(node.target in WAITS for node in following)

    def independent_matmuls(self, wait: fx.Node) -> list[fx.Node]:
        """Return the matmuls after a wait, of its phase and layer, up to the first node that must come after the wait.

        Such a node is a kernel that needs it, a write to memory that is read for it, or the wait for a later collective
        of its communicator.
        """
        start, dependent = started(wait), {wait}
        read = set(map(base_of, start.all_input_nodes))
        matmuls = []
        for node in after(wait):
            needs = not dependent.isdisjoint(node.all_input_nodes)
            needs_now = needs and (node in self.matmuls or kind_of(node) or is_mutable(node))
            if needs_now or self.comes_later(node, start):
                break
            if is_mutable(node) and base_of(node.args[0]) in read:  # type: ignore[arg-type]
                break
            if node in self.matmuls and place_of(node) != place_of(wait):
                break
            if needs:
                dependent.add(node)
                read.update(map(base_of, node.all_input_nodes))
            elif node in self.matmuls:
                matmuls.append(node)
        return matmuls

    def comes_later(self, wait: fx.Node, start: fx.Node) -> bool:
        """Return True if a node waits for a collective that its communicator begins after another one."""
        if wait.target not in WAITS:
            return False
        other = started(wait)
        return start < other and communicator_of(other) == communicator_of(start)
