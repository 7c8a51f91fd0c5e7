"""Find each layer's first node in a program with explicit collectives, and the nodes in it that belong to others.

    add(x, mm)                         layer 0
    start gather of layer 2            aside: a prefetch for another layer
    norm, wait for gather of layer 1   layer 1: its parameters are gathered, so it begins at its first operator
    mm                                 without that it begins here, and its norm runs in one kernel with layer 0's sum

A node aside is no part of the layer that it stands in: `overlap` puts it where layers begin and records its role,
`segment` makes it a piece of its own. So layers stay alike, whatever starts or arrives while they are computed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import takewhile

from torch import fx

from passes.cost.accounting import count_flops
from passes.cost.fusion import ALONE, WAITS
from passes.program import ir
from passes.program.abstract_eval import recorded
from passes.program.layer import Layer, Role
from passes.program.operators import is_operator, is_view, kind_of, may_alias, name_of
from passes.program.weights import weight_nodes

COPIES = frozenset({"clone", "_to_copy"})
Place = tuple[str, Layer | None]  # a phase, and a layer or none


def products_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Matrix products and attentions, with their FLOPs."""
    sizes = recorded()
    return {node: count for node in graph.nodes if node.op == "call_function" and (count := count_flops(node, sizes))}


def kernels_of(program: ir.Program) -> set[fx.Node]:
    """Operators that run as a kernel of their own: products, attentions, sorts, scatters."""
    alone = (n for n in program.calls() if name_of(n) in ALONE)
    return {*products_of(program.graph), *alone}


# ---- where layers begin -----------------------------------------------------------------------------


def begins_of(program: ir.Program, kernels: Container[fx.Node]) -> dict[fx.Node, Place]:
    """The first node of each layer in each phase, and of what comes after layers."""
    weights, aside = set(weight_nodes(program)), roles_aside(program, kernels)
    found: dict[fx.Node, Place] = {}
    seen = set[Place]()
    here: Place = "", None
    stretch: list[fx.Node] = []  # since the last kernel
    for node in program.calls():
        if node in kernels and ir.phase(node) != "optimizer":
            place = place_of(node)
            if place not in seen or place != here and not place[1]:
                own = [n for n in stretch if place_of(n) == place and n not in aside and not is_view(n)]
                tied = any(travels(n) and (n in weights or place[0] == "backward") for n in own)
                first = next((n for n in own if n not in weights), own[0]) if tied else computed_again(stretch, node)
                found[first] = here = place
                seen.add(place)
            stretch = []
        else:
            stretch.append(node)
    return found


def place_of(node: fx.Node) -> Place:
    """Where an operator is at work."""
    return ir.phase(node), ir.layer(node)


def computed_again(stretch: Sequence[fx.Node], kernel: fx.Node) -> fx.Node:
    """The first of the operators before a kernel that only make again, from what was kept, what it reads."""
    again = takewhile(lambda n: is_view(n) or ir.is_recomputed(n) and not travels(n), reversed(stretch))
    return [kernel, *again][-1]


def travels(node: fx.Node) -> bool:
    """Whether a node starts a collective or waits for one."""
    return kind_of(node) is not None or node.target in WAITS


# ---- what is aside ----------------------------------------------------------------------------------


def roles_aside(program: ir.Program, kernels: Container[fx.Node]) -> dict[fx.Node, Role]:
    """The nodes that belong to another layer than the one they stand in, and their roles.

    Those are the inputs and starts of parameter all-gathers, the starts of gradient reductions, and all that follows
    these. A node before a kernel of its own layer is not aside.
    """
    found = dict[fx.Node, Role]()
    for node in reversed(weight_nodes(program)):
        if kind_of(node) or any(user in found for user in node.users):
            found[node] = Role("prefetch", *place_of(node))
    tails = gradient_tails(program, kernels)
    arrived = after_waits(program, tails)
    following = None  # the layer of the next kernel
    for node in reversed(list(program.calls())):
        if node in kernels:
            following = ir.layer(node)
        elif node in tails and (node in arrived or kind_of(node)) and ir.layer(node) != following:
            found[node] = Role("late", "backward", ir.layer(node))
    return found


def gradient_tails(program: ir.Program, kernels: Container[fx.Node]) -> set[fx.Node]:
    """What becomes of gradients of parameters: nodes of the backward that lead to no kernel of it, or sum replicas."""
    found, backward = set[fx.Node](), False
    for node in reversed(list(program.calls())):
        if node in kernels:
            backward |= ir.phase(node) == "backward"
        elif (backward or ir.phase(node) == "backward") and ir.phase(node) != "forward" and leaves(node, found):
            found.add(node)
    return found


def leaves(node: fx.Node, tails: Container[fx.Node]) -> bool:
    """Whether a node of the backward has no other users than tails, the optimizer and the end."""
    return all(user in tails or user.op == "output" or ir.phase(user) == "optimizer" for user in node.users)


def after_waits(program: ir.Program, tails: Container[fx.Node]) -> set[fx.Node]:
    """Waits, operators that lay out anew or copy what was waited for, and whatever becomes of reduced gradients."""
    found = set[fx.Node]()
    for node in program.calls():
        operands = node.all_input_nodes
        follows = operands and found.issuperset(operands) and (node in tails or lays_out(node))
        if node.target in WAITS or follows:
            found.add(node)
    return found


def lays_out(node: fx.Node) -> bool:
    """Whether an operator yields its operand's entries, in its memory or in a copy."""
    return not is_operator(node) or may_alias(node) or name_of(node) in COPIES  # or a part of a tuple


# ---- all of it --------------------------------------------------------------------------------------


def roles_of(program: ir.Program, kernels: Container[fx.Node]) -> Iterator[tuple[fx.Node, Role]]:
    """Each operator with what it is to the layers, as they stand in order."""
    begins, aside, last = begins_of(program, kernels), roles_aside(program, kernels), after_products(program, kernels)
    own = role = Role("own", "forward", None)
    for node in program.calls():
        own = Role("own", *begins[node]) if node in begins else own
        if node in last:
            is_update = ir.phase(node) == "optimizer"
            role = Role("update", *place_of(node), ir.parameter(node)) if is_update else role
        else:
            other = aside.get(node, own)
            role = own if (other.kind, other.phase, other.layer) == ("prefetch", own.phase, own.layer) else other
        yield node, role


def after_products(program: ir.Program, kernels: Container[fx.Node]) -> set[fx.Node]:
    """The operators after the last kernel of forward and backward."""
    return set(takewhile(lambda n: n not in kernels or ir.phase(n) == "optimizer", reversed(list(program.calls()))))
