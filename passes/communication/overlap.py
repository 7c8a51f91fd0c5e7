"""Let collectives run beside computation: they start early, and are waited for late.

    start gather of layer 1          forward: the weights of the next layer travel while this one is computed
    wait for gather of layer 0
    products of layer 0

    start reduce-scatter of layer 1  backward: gradients travel while the layer before is computed,
    products of layer 0              and are waited for when its own are to be sent
    wait for layer 1, start layer 0

    gradient of the input            backward, tensor parallel: the gradient of the weight, which nobody waits for,
    start reduce-scatter of it       is computed while the gradient of the input travels
    gradient of the weight
    wait

- Gathers of parameters start where the layer `prefetch` places before the one that uses them begins.
- Gradients are sent where the kernel ends that makes the last of them.
- A wait stands right before what needs its result, and with it whatever only lays that result out anew. Gradients are
  waited for `prefetch` layers later at the latest: until then what was sent stays in memory. What is then reduced over
  another axis is waited for as much later again.
- A collective should have products beside it that take as long as it does (`FLOPS_PER_SENT_BYTE`). One that needs
  none of the products before it, as when activations are gathered again, or rows of experts travel in chunks, starts
  that much earlier. Another gets, in the backward, products of gradients of weights from before its start. Both reach
  back one layer at most.

The operators stay the same, and so do results, to the bit: only the order changes, and each says in the end what it is
to the layers (`Role` in `passes/program/layer.py`). Collectives of a communicator keep one order on all ranks, for all
ranks run one program.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
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
    place_of,
    products_of,
    roles_of,
)
from passes.cost.accounting import sent_bytes
from passes.cost.fusion import WAITS
from passes.program import ir
from passes.program.abstract_eval import recorded
from passes.program.bodies import base_of
from passes.program.machine import FLOPS_PER_SENT_BYTE
from passes.program.operators import communicator_of, is_mutable, kind_of, started
from passes.program.rewrite import move_after, move_before
from passes.program.stages import Stage
from passes.program.weights import weight_nodes

COUNTS = ("collectives", "with_products_beside_before", "with_products_beside_after")


@dataclass(frozen=True)
class Overlap(ir.Pass):
    """Start gathers of parameters `prefetch` layers early, wait for gradients as late; 0 leaves the order as it is."""

    prefetch: int = 1
    name = "overlap"
    takes = (Stage.EXPLICIT,)
    gives = Stage.ORDERED
    keeps = True
    after = ("communicators",)  # collectives of one are sent one after another

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        products, kernels = products_of(program.graph), kernels_of(program)
        before = count_beside(program.graph, products)
        if self.prefetch and any(in_flight(program.graph)):
            self.order(program, products, kernels)
        for node, role in roles_of(program, kernels):
            ir.set_role(node, role)
        program.module.recompile()
        counts = sum(1 for _ in in_flight(program.graph)), before, count_beside(program.graph, products)
        return program, ir.Report(dict(zip(COUNTS, counts)))

    def order(self, program: ir.Program, products: Mapping[fx.Node, int], kernels: set[fx.Node]) -> None:
        """Move what travels, and what only follows it; changes the graph."""
        tails, begins = gradient_tails(program, kernels), begins_of(program, kernels)
        wait_late(program, self.prefetch, tails, kernels.union(begins))
        start_early(program, self.prefetch, begins)
        fill(program, products, tails)


# ---- what is in flight ------------------------------------------------------------------------------


def in_flight(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each collective with the first of its waits, as they are waited for."""
    seen = set()
    for node in graph.nodes:
        if node.target in WAITS and (start := started(node)) not in seen:
            seen.add(start)
            yield start, node


def between(start: fx.Node, wait: fx.Node) -> Iterator[fx.Node]:
    """The nodes between a collective and its wait, the last first."""
    return takewhile(lambda node: node is not start, before(wait))


def before(node: fx.Node) -> Iterator[fx.Node]:
    """The operators before a node, the nearest first."""
    while (node := node.prev).op not in ("placeholder", "root"):
        yield node


def after(node: fx.Node) -> Iterator[fx.Node]:
    """The operators after a node, the nearest first."""
    while (node := node.next).op not in ("output", "root"):
        yield node


def count_beside(graph: fx.Graph, products: Container[fx.Node]) -> int:
    """How many collectives have a product between their start and their wait."""
    return len(products_to_wait_for(graph, products))


def products_to_wait_for(graph: fx.Graph, products: Container[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each wait, the last product that stands between it and its collective."""
    found = {}
    for start, wait in in_flight(graph):
        if product := next((node for node in between(start, wait) if node in products), None):
            found[wait] = product
    return found


# ---- early starts, late waits -----------------------------------------------------------------------


def start_early(program: ir.Program, prefetch: int, begins: Mapping[fx.Node, Place]) -> None:
    """Start the gathers of a layer where the layer `prefetch` places before it begins, their maxima one before."""
    weights = set(weight_nodes(program))
    unwritten = takewhile(lambda node: not writes_input(node), program.calls())
    early = [node for node in unwritten if node in weights and kind_of(node) in ("all_gather", "all_reduce")]
    gathers = [node for node in early if kind_of(node) == "all_gather"]
    runs = [(place, list(run)) for place, run in groupby(gathers, place_of)]
    first = {place: node for node, place in begins.items() if place[1]}
    places = [first.get(place, run[0].next) for place, run in runs]
    number = {place: i for i, (place, _) in enumerate(runs) if place[1]}
    for i, (_, run) in enumerate(runs):
        for start in run:
            move_before(start, places[max(0, i - prefetch)])
    for start in early:
        place = place_of(start)
        if kind_of(start) == "all_reduce" and place in number:
            move_before(start, places[max(0, number[place] - prefetch - 1)])


def wait_late(program: ir.Program, prefetch: int, tails: set[fx.Node], ends: set[fx.Node]) -> None:
    """Put waits, and what only follows them, right before what needs them; send gradients at a kernel's end."""
    following = after_waits(program, tails)
    sending = {node for node in tails - following if kind_of(node)}
    latest = latest_places(program, prefetch, sending, following)
    stops = ends.union(sending, (n for n in following - tails if n.target in WAITS))
    end, written = program.graph.output_node(), dict[fx.Node, fx.Node]()  # inputs, and where they are written first
    for node in reversed(list(program.calls())):
        if is_mutable(node):
            written[node.args[0]] = node  # type: ignore[index]
        if node in sending and (stop := next((n for n in after(node) if n in stops), None)):
            min(stop, *node.users).prepend(node)
        if node in following:
            sent = started(node).all_input_nodes if node.target in WAITS else ()
            barriers = (written[n] for n in map(base_of, sent) if n in written)  # what is in flight must not change
            min(end, latest.get(node, end), *barriers, *node.users).prepend(node)


def latest_places(
    program: ir.Program, prefetch: int, sending: set[fx.Node], following: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Before which collective gradients are waited for: the first one `prefetch` layers on.

    One that is reduced over one axis after another is sent on there, and waited for as much later again.
    """
    sends = [node for node in program.calls() if node in sending]
    runs = [list(run) for _, run in groupby(sends, ir.layer)]
    due = {start: i for i, run in enumerate(runs) for start in run}  # at the first collective of which run
    found = {}
    for node in program.calls():
        known = [due[operand] for operand in node.all_input_nodes if operand in due]
        if node in following and known:
            due[node] = max(known) + (prefetch if node.target in WAITS else 0)
            if (node.target in WAITS or kind_of(node)) and due[node] < len(runs):
                found[node] = runs[due[node]][0]
    return found


# ---- products beside collectives --------------------------------------------------------------------


def fill(program: ir.Program, products: Mapping[fx.Node, int], tails: set[fx.Node]) -> None:
    """See that collectives have as many products beside them as they take time."""
    sizes = recorded()
    pairs, busy = list(in_flight(program.graph)), set[fx.Node]()
    elsewhere = tails.union(weight_nodes(program))  # what `start_early` and `wait_late` see to
    waited, coming = {wait: start for start, wait in pairs}, sorted((start for start, _ in pairs), reverse=True)
    flying = set[fx.Node]()  # what started before the wait at hand and is waited for after it
    for start, wait in pairs:
        while coming and coming[-1] < wait:
            flying.add(coming.pop())
        flying.remove(start)
        if ir.phase(start) == "optimizer" or start in elsewhere:
            continue
        inside = list(between(start, wait))
        beside = [node for node in inside if node in products]
        busy.update(beside)
        missing = sent_bytes(start, sizes, program.mesh) * FLOPS_PER_SENT_BYTE - sum(map(products.__getitem__, beside))
        if missing <= 0:
            continue
        near = products_before(start, products)
        around = flying.union(waited[node] for node in inside if node in waited)
        others = {s for s in around if s < start and communicator_of(s) == communicator_of(start)}
        if place := earlier(start, missing, near, others, products):
            move_before(start, place)
            continue
        for product in near:  # of the backward, gradients of weights: nothing but tails needs them
            if missing > 0 and product not in busy and leaves(product, tails):
                move_after(product, wait.prev)
                busy.add(product)
                missing -= products[product]


def products_before(start: fx.Node, products: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Products of its phase before a collective, of its layer and of one more, the nearest first."""
    found, seen = [], {ir.layer(start)}
    for node in before(start):
        if node in products:
            seen.add(ir.layer(node))
            if len(seen) > 2 or ir.phase(node) != ir.phase(start):
                break
            found.append(node)
    return found


def earlier(
    start: fx.Node, missing: int, near: list[fx.Node], others: set[fx.Node], products: Mapping[fx.Node, int]
) -> fx.Node | None:
    """The earliest of the products `near` before which a collective can start, needing none from there on, or None.

    Products beside another collective of the same communicator do not count, since that one goes first: `others` are
    those in flight where it starts.
    """
    needed, others = set(start.all_input_nodes), set(others)
    for node in before(start):
        if not near or node in needed and (node in products or kind_of(node)):
            return None
        if node in needed:
            needed.update(node.all_input_nodes)
        if node.target in WAITS and communicator_of(started(node)) == communicator_of(start):
            others.add(started(node))
        others.discard(node)
        if node in products:
            missing -= 0 if others else products[node]
            if missing <= 0:
                return node
            if node is near[-1]:
                return None
    return None
