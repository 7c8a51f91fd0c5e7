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

- Gathers of parameters start `ahead` layers before the layer that uses them.
- A wait stands right before what needs its result, and with it whatever only lays that result out anew. Gradients are
  waited for `ahead` layers later at the latest: until then what was sent stays in memory. What is then reduced over
  another axis is waited for as much later again.
- A collective of the backward should have products beside it that take as long as it does (`FLOPS_PER_BYTE`). One that
  needs none of the products before it, as when activations are gathered again, starts that much earlier. Another gets
  products of gradients of weights from before its start. Both reach back one layer at most.

The operators stay the same, and so do results, to the bit: only the order changes. Collectives of a communicator
keep one order on all ranks, for all ranks run one program.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from torch import fx

from passes.communication.schedule import writes_input
from passes.cost.accounting import communicator_of, count_flops, kind_of, sent_bytes, started
from passes.cost.cluster import FLOPS_PER_BYTE
from passes.cost.fusion import WAITS
from passes.program import ir
from passes.program.bodies import base_of
from passes.program.regions import regions, weight_nodes
from passes.program.rewrite import move_after, move_before
from passes.program.sweep import recorded
from passes.program.torch_private import OpOverload

COPIES = frozenset({"aten::clone", "aten::_to_copy"})
COUNTS = ("collectives", "with_products_beside_before", "with_products_beside_after")


@dataclass(frozen=True)
class Overlap:
    """Start gathers of parameters `ahead` layers early, wait for gradients as late; 0 leaves the order as it is."""

    ahead: int = 1
    name: str = "overlap"
    requires: frozenset[str] = frozenset({"collectives"})
    establishes: frozenset[str] = frozenset({"overlap"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(in_flight(program.graph)):
            return program, ir.Report(dict.fromkeys(COUNTS, 0))
        program = program.copy()
        products, layers = products_of(program.graph), regions(program)
        tails = gradient_tails(program, products)
        before = count_beside(program.graph, products)
        if self.ahead:
            start_early(program, self.ahead, layers)
            wait_late(program, self.ahead, tails, layers)
            fill(program, products, tails, layers)
        program.module.recompile()
        counts = sum(1 for _ in in_flight(program.graph)), before, count_beside(program.graph, products)
        return replace(program, facts=program.facts | self.establishes), ir.Report(dict(zip(COUNTS, counts)))


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


def products_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Matrix products and attentions, with their FLOPs."""
    sizes = recorded()
    return {node: count for node in graph.nodes if node.op == "call_function" and (count := count_flops(node, sizes))}


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


def start_early(program: ir.Program, ahead: int, layers: Mapping[fx.Node, str]) -> None:
    """Start the gathers of a layer where those of the layer `ahead` places before it began, their maxima one before."""
    weights = set(weight_nodes(program))
    unwritten = takewhile(lambda node: not writes_input(node), program.calls())
    early = [node for node in unwritten if node in weights and kind_of(node) in ("all_gather", "all_reduce")]

    def runs_of(kind: str) -> dict[tuple[str, str], list[fx.Node]]:
        found: dict[tuple[str, str], list[fx.Node]] = {}
        for node in early:
            if kind_of(node) == kind:
                found.setdefault((ir.phase(node), layers[node]), []).append(node)
        return found

    gathers = runs_of("all_gather")
    places = [run[0].next for run in gathers.values()]
    number = {run: i for i, run in enumerate(gathers)}
    for i, run in enumerate(gathers.values()):
        for start in run:
            move_before(start, places[max(0, i - ahead)])
    for key, maxima in runs_of("all_reduce").items():
        for start in maxima if key in number else ():
            move_before(start, places[max(0, number[key] - ahead - 1)])


def wait_late(program: ir.Program, ahead: int, tails: set[fx.Node], layers: Mapping[fx.Node, str]) -> None:
    """Put waits, and what only follows them, right before what needs them."""
    following = after_waits(program, tails)
    latest = latest_places(program, ahead, tails - following, following, layers)
    end, written = program.graph.output_node(), dict[fx.Node, fx.Node]()  # inputs, and where they are written first
    for node in reversed(list(program.calls())):
        if is_write(node):
            written[node.args[0]] = node  # type: ignore[index]
        if node in following:
            sent = started(node).all_input_nodes if node.target in WAITS else ()
            barriers = (written[n] for n in map(base_of, sent) if n in written)  # what is in flight must not change
            min(end, latest.get(node, end), *barriers, *node.users).prepend(node)


def after_waits(program: ir.Program, tails: set[fx.Node]) -> set[fx.Node]:
    """Waits, operators that lay out anew or copy what was waited for, and whatever becomes of reduced gradients."""
    found = set[fx.Node]()
    for node in program.calls():
        operands = node.all_input_nodes
        follows = operands and found.issuperset(operands) and (node in tails or lays_out(node))
        if node.target in WAITS or follows:
            found.add(node)
    return found


def gradient_tails(program: ir.Program, products: Container[fx.Node]) -> set[fx.Node]:
    """Nodes of the backward that lead to no product of it: what becomes of gradients of parameters."""
    found = set[fx.Node]()
    for node in reversed(list(program.calls())):
        if ir.phase(node) == "backward" and node not in products and leaves(node, found):
            found.add(node)
    return found


def leaves(node: fx.Node, tails: set[fx.Node]) -> bool:
    """Whether a node of the backward has no other users than tails, the optimizer and the end."""
    return all(user in tails or user.op == "output" or ir.phase(user) == "optimizer" for user in node.users)


def latest_places(
    program: ir.Program, ahead: int, sending: set[fx.Node], following: set[fx.Node], layers: Mapping[fx.Node, str]
) -> dict[fx.Node, fx.Node]:
    """Before which collective gradients are waited for: the first one `ahead` layers on.

    One that is reduced over one axis after another is sent on there, and waited for as much later again.
    """
    sends = [node for node in program.calls() if node in sending and kind_of(node)]
    runs = [list(run) for _, run in groupby(sends, layers.__getitem__)]
    due = {start: i for i, run in enumerate(runs) for start in run}  # at the first collective of which run
    found = {}
    for node in program.calls():
        known = [due[operand] for operand in node.all_input_nodes if operand in due]
        if node in following and known:
            due[node] = max(known) + (ahead if node.target in WAITS else 0)
            if (node.target in WAITS or kind_of(node)) and due[node] < len(runs):
                found[node] = runs[due[node]][0]
    return found


def lays_out(node: fx.Node) -> bool:
    """Whether an operator yields its operand's entries, in its memory or in a copy."""
    if not isinstance(node.target, OpOverload):
        return True  # operator.getitem
    schema = node.target._schema
    views = any(result.alias_info is not None for result in schema.returns)
    return not schema.is_mutable and (views or schema.name in COPIES)


def is_write(node: fx.Node) -> bool:
    """Whether an operator changes an operand."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


# ---- products beside collectives --------------------------------------------------------------------


def fill(
    program: ir.Program, products: Mapping[fx.Node, int], tails: set[fx.Node], layers: Mapping[fx.Node, str]
) -> None:
    """See that collectives of the backward have as many products beside them as they take time."""
    sizes = recorded()
    pairs, busy = list(in_flight(program.graph)), set[fx.Node]()
    elsewhere = tails.union(weight_nodes(program))  # what `start_early` and `wait_late` see to
    waited, coming = {wait: start for start, wait in pairs}, sorted((start for start, _ in pairs), reverse=True)
    flying = set[fx.Node]()  # what started before the wait at hand and is waited for after it
    for start, wait in pairs:
        while coming and coming[-1] < wait:
            flying.add(coming.pop())
        flying.remove(start)
        if ir.phase(start) != "backward" or start in elsewhere:
            continue
        inside = list(between(start, wait))
        beside = [node for node in inside if node in products]
        busy.update(beside)
        missing = sent_bytes(start, sizes, program.mesh) * FLOPS_PER_BYTE - sum(map(products.__getitem__, beside))
        if missing <= 0:
            continue
        near = products_before(start, products, layers)
        around = flying.union(waited[node] for node in inside if node in waited)
        others = {s for s in around if s < start and communicator_of(s) == communicator_of(start)}
        if place := earlier(start, missing, near, others, products):
            move_before(start, place)
            continue
        for product in near:  # gradients of weights: nothing but tails needs them
            if missing > 0 and product not in busy and leaves(product, tails):
                move_after(product, wait.prev)
                busy.add(product)
                missing -= products[product]


def products_before(start: fx.Node, products: Mapping[fx.Node, int], layers: Mapping[fx.Node, str]) -> list[fx.Node]:
    """Products of the backward before a collective, of its layer and of one more, the nearest first."""
    found, seen = [], {layers[start]}
    for node in before(start):
        if node in products:
            seen.add(layers[node])
            if len(seen) > 2 or ir.phase(node) != "backward":
                break
            found.append(node)
    return found


def earlier(
    start: fx.Node, missing: int, near: list[fx.Node], others: set[fx.Node], products: Mapping[fx.Node, int]
) -> fx.Node | None:
    """Before which of the products `near` a collective may start that needs none from there on; None if there is none.

    Products beside another collective of its communicator do not count, for these come in turn: `others` are those that
    are in flight where it starts.
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
