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
- A collective should have products beside it that take as long as it does (`Balance`). It starts before the products
  that it does not need, as when activations are gathered again, or rows of experts travel in chunks. If that is not
  enough it gets, in the backward, products of gradients of weights from before its start, and then is waited for after
  products that do not need it, as those of shared experts. All of these are of its layer, or of the one before. How
  much is missing a `Clock` tells: what a communicator was given before goes first.

The operators stay the same, and so do results, to the bit: only the order changes, and each says in the end what it is
to the layers (`Role` in `passes/program/layer.py`). Collectives of a communicator keep one order on all ranks, for all
ranks run one program.
"""

from __future__ import annotations

import math
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
from passes.program.editor import move_after, move_before
from passes.program.machine import H100, Balance
from passes.program.mesh import Mesh
from passes.program.operators import axis_of, communicator_of, is_mutable, kind_of, started
from passes.program.stages import Stage
from passes.program.weights import weight_nodes

COUNTS = ("collectives", "with_products_beside_before", "with_products_beside_after")


@dataclass(frozen=True)
class Overlap(ir.Pass):
    """Start gathers of parameters `prefetch` layers early, wait for gradients as late; 0 leaves the order as it is.

    How much is to be computed beside a collective the `balance` of a machine says.
    """

    prefetch: int = 1
    balance: Balance = H100
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
            ir.update(node, role=role)
        program.module.recompile()
        counts = sum(1 for _ in in_flight(program.graph)), before, count_beside(program.graph, products)
        return program, ir.Report(dict(zip(COUNTS, counts)))

    def order(self, program: ir.Program, products: Mapping[fx.Node, int], kernels: set[fx.Node]) -> None:
        """Move what travels, and what only follows it; changes the graph."""
        tails, begins = gradient_tails(program, kernels), begins_of(program, kernels)
        wait_late(program, self.prefetch, tails, kernels.union(begins))
        start_early(program, self.prefetch, begins)
        fill(program, products, tails, self.balance)


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


def fill(program: ir.Program, products: Mapping[fx.Node, int], tails: set[fx.Node], balance: Balance) -> None:
    """See that collectives have as many products beside them as they take time."""
    pairs, busy = list(in_flight(program.graph)), set[fx.Node]()
    takes = travel_flops(pairs, program.mesh, balance)
    elsewhere = tails.union(weight_nodes(program))  # what `start_early` and `wait_late` see to
    waited, coming = {wait: start for start, wait in pairs}, sorted(takes, reverse=True)
    flying = set[fx.Node]()  # what started before the wait at hand and is waited for after it
    clock = Clock(program.graph, products, takes)
    for start, wait in pairs:
        while coming and coming[-1] < wait:
            flying.add(coming.pop())
        flying.remove(start)
        missing = clock.missing(start, wait)
        inside = list(between(start, wait))
        seen_to = ir.phase(start) == "optimizer" or start in elsewhere
        busy.update(node for node in inside if node in products and not seen_to)
        if missing <= 0 or seen_to:
            clock.wait(wait, missing)
            continue
        around = flying.union(waited[node] for node in inside if node in waited)
        others = {s for s in around if s < start and communicator_of(s) == communicator_of(start)}
        near = products_before(start, products)
        passed, missing = earlier(start, missing, near, others, clock)
        if passed:
            move_before(start, passed[-1])
        busy.update(passed)
        for product in near:  # of the backward, gradients of weights: nothing but tails needs them
            if missing > 0 and product not in busy and can_follow(product, wait, tails):
                clock.moves(product, wait)
                move_after(product, wait.prev)
                busy.add(product)
                missing -= products[product]
        for product in independent(wait, products):
            if missing > 0 and product not in busy and not leaves(product, tails):  # a later one may get those
                move_after(wait, product)
                busy.add(product)
                missing -= products[product]
        clock.wait(wait, missing)


class Clock:
    """How long it takes to come to a wait, in FLOPs, and until what it waits for is there.

    What a communicator sends comes in turn.
    """

    def __init__(self, graph: fx.Graph, products: Mapping[fx.Node, int], takes: Mapping[fx.Node, int]):
        self.products, self.takes, self.now = products, takes, 0
        self.at = next(iter(graph.nodes))  # up to where it has been counted
        self.free = dict[str | None, int]()  # when a communicator has sent what it was given
        self.began, self.there = dict[fx.Node, int](), dict[fx.Node, int]()  # of a collective
        self.idle = dict[fx.Node, int]()  # how long nothing was computed at a wait

    def missing(self, start: fx.Node, wait: fx.Node) -> int:
        """How long after the wait is come to a collective is there, if this is later."""
        while (node := self.at.next) is not wait:
            self.at = node
            self.now += self.products.get(node, 0)
            if node in self.takes:
                communicator = communicator_of(node)
                self.began[node] = self.now
                begins = max(self.now, self.free.get(communicator, 0))
                self.there[node] = self.free[communicator] = begins + self.takes[node]
        return self.there[start] - self.now

    def moves(self, product: fx.Node, wait: fx.Node) -> None:
        """A product that was counted will stand right before the wait: what starts in between does so earlier."""
        flops = self.products[product]
        self.now -= flops
        for start in (node for node in between(product, wait) if node in self.there):
            communicator = communicator_of(start)
            if self.free[communicator] == self.there[start]:
                self.free[communicator] -= flops
            self.began[start] -= flops
            self.there[start] -= flops

    def wait(self, wait: fx.Node, flops: int) -> None:
        """Come to a wait that nothing is computed beside for a while."""
        self.idle[wait] = max(0, flops)
        self.now += self.idle[wait]


def can_follow(product: fx.Node, wait: fx.Node, tails: set[fx.Node]) -> bool:
    """Whether only tails need a product, and none that waits before the wait at hand."""
    following, waiting = {product}, [product]
    while waiting:
        new = {user for user in waiting.pop().users if user < wait} - following
        following |= new
        waiting += new
    return leaves(product, tails) and not any(node.target in WAITS for node in following)


def travel_flops(pairs: list[tuple[fx.Node, fx.Node]], mesh: Mesh, balance: Balance) -> dict[fx.Node, int]:
    """FLOPs that take as long as each collective; whole numbers, of which equal sums are equal."""
    sizes, found = recorded(), {}
    for start, _ in pairs:
        kind, axis = kind_of(start), axis_of(start)
        assert kind is not None and axis is not None
        found[start] = math.ceil(balance.flops(kind, sent_bytes(start, sizes, mesh), mesh, axis))
    return found


def products_before(start: fx.Node, products: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Products of its phase before a collective, of its layer and of one more, the nearest first.

    What is of no layer stays behind the first product that is of none, and what is of one before none of these: else
    the last layer is not like the others.
    """
    found, layers = [], {ir.layer(start)}
    for node in before(start):
        if node in products:
            layers.add(ir.layer(node))
            if len(layers) > 2 or len(layers) > 1 and None in layers or ir.phase(node) != ir.phase(start):
                break
            found.append(node)
    return found if ir.layer(start) else found[:-1]


def earlier(
    start: fx.Node, missing: int, near: list[fx.Node], others: set[fx.Node], clock: Clock
) -> tuple[list[fx.Node], int]:
    """The products `near` that a collective can start before, needing none from there on, and what is missing then.

    No more than hide it, or help: it may have to wait for what it needs itself, and for `others` of its communicator,
    which are in flight where it starts now.
    """
    needed, others = set(start.all_input_nodes), set(others)
    passed, counted = list[fx.Node](), 0  # all, and how many of them there are up to the last that helps
    now, there = clock.began[start], 0
    for node in before(start):
        if missing <= 0 or len(passed) == len(near) or node in needed and (node in clock.products or kind_of(node)):
            break
        if is_mutable(node) and base_of(node.args[0]) in map(base_of, needed):  # type: ignore[arg-type]
            break
        if node in needed:
            needed.update(node.all_input_nodes)
            there = max(there, clock.there[started(node)] if node.target in WAITS else 0)
        now -= clock.idle.get(node, 0)
        if node.target in WAITS and communicator_of(started(node)) == communicator_of(start):
            others.add(started(node))
        others.discard(node)
        if node in clock.products:
            now -= clock.products[node]
            passed.append(node)
            idle = max(0, there - now)
            begins = max(now + idle, *(clock.there[other] for other in others), 0)
            lost = idle + max(0, begins + clock.takes[start] - clock.now - idle)
            if lost < missing or lost == missing and not idle:
                counted, missing = len(passed), lost
    return passed[:counted], missing


def independent(wait: fx.Node, products: Container[fx.Node]) -> list[fx.Node]:
    """Products after a wait, of its phase and layer, up to the first node that has to come after it.

    That is a kernel that needs it, a write of what is read for it, or the wait for what comes after it on its way.
    """
    start, held = started(wait), {wait}
    read = set(map(base_of, start.all_input_nodes))
    found = []
    for node in after(wait):
        needs = not held.isdisjoint(node.all_input_nodes)
        if needs and (node in products or kind_of(node) or is_mutable(node)) or comes_later(node, start):
            break
        if is_mutable(node) and base_of(node.args[0]) in read:  # type: ignore[arg-type]
            break
        if node in products and place_of(node) != place_of(wait):
            break
        if needs:
            held.add(node)
            read.update(map(base_of, node.all_input_nodes))
        elif node in products:
            found.append(node)
    return found


def comes_later(wait: fx.Node, start: fx.Node) -> bool:
    """Whether a node waits for a collective that its communicator begins after another one."""
    if wait.target not in WAITS:
        return False
    other = started(wait)
    return start < other and communicator_of(other) == communicator_of(start)
