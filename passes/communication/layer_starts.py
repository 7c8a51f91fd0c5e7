"""Give each operator of a program with explicit collectives its role: the layer that it works for, and why.

    add(x, mm)                         layer 0
    start gather of layer 2            prefetch: for another layer
    norm, wait for gather of layer 1   layer 1: its parameters are gathered, so it begins at its first operator
    mm                                 without a gather it begins here, and its norm shares a kernel with layer 0's sum

The first of these that applies decides (`roles_of`):

    update     after the last kernel of forward and backward: the update of a parameter
    prefetch   gathers a parameter of another layer than the one that it stands in
    late       belongs to a gradient of another layer's parameter: its reduction, the wait, copies
    own        belongs to the layer that began last

`overlap` moves nodes of other layers to where layers begin and records the roles; `segment` turns each run of one role
into a piece. So layers stay equal, whatever is sent or received while they are computed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import takewhile

from torch import fx

from passes.cost.accounting import count_flops
from passes.cost.fusion import ALONE, WAITS
from passes.ir import ir
from passes.ir.layer import Layer, Role
from passes.ir.operators import is_operator, is_view, kind_of, may_alias, name_of
from passes.ir.slices import weight_nodes
from passes.trace.abstract_eval import recorded

COPIES = frozenset({"clone", "_to_copy"})
Place = tuple[str, Layer | None]  # a phase, and a layer or none
FIRST, INSIDE = "the first operator of the layer", "stands in the layer"
GATHERS, REDUCES, ENDS = "for another layer's parameters", "of another layer's gradients", "after the last kernel"


def matmuls_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return matmuls and attentions, with their FLOPs."""
    sizes = recorded()
    return {node: count for node in graph.nodes if node.op == "call_function" and (count := count_flops(node, sizes))}


def kernels_of(program: ir.Program) -> set[fx.Node]:
    """Return the operators that run as a kernel of their own: matmuls, attentions, sorts, scatters."""
    alone = (n for n in program.calls() if name_of(n) in ALONE)
    return {*matmuls_of(program.graph), *alone}


def place_of(node: fx.Node) -> Place:
    """Return the phase and the layer of an operator."""
    return ir.phase(node), ir.layer(node)


def roles_of(program: ir.Program, kernels: Container[fx.Node]) -> Iterator[tuple[fx.Node, Role, str]]:
    """Yield each operator with its role and the reason, in order."""
    begins, aside, last = begins_of(program, kernels), roles_aside(program, kernels), after_kernels(program, kernels)
    default = role = Role("own", "forward", None)  # default: of the layer that began last
    for node in program.calls():
        default = Role("own", *begins[node]) if node in begins else default
        if node in last:
            role = Role("update", *place_of(node), ir.parameter(node)) if ir.phase(node) == "optimizer" else role
            yield node, role, ENDS
        elif node in aside and aside[node] != Role("prefetch", default.phase, default.layer):
            role = aside[node]
            yield node, role, GATHERS if role.kind == "prefetch" else REDUCES
        else:
            role = default
            yield node, role, FIRST if node in begins else INSIDE


# ---- first operators of layers ----------------------------------------------------------------------


def begins_of(program: ir.Program, kernels: Container[fx.Node]) -> dict[fx.Node, Place]:
    """Return the first operator of each layer in each phase, and of each run of kernels outside of layers."""
    weights, aside = set(weight_nodes(program)), roles_aside(program, kernels)
    begins, places = dict[fx.Node, Place](), list[Place]()
    stretch: list[fx.Node] = []  # since the last kernel
    for node in program.calls():
        if node not in kernels or ir.phase(node) == "optimizer":
            stretch.append(node)
            continue
        place = place_of(node)
        if place not in places or place[1] is None and place != places[-1]:
            begins[first_of(stretch, node, weights, aside)] = place
            places.append(place)
        stretch = []
    return begins


def first_of(
    stretch: Sequence[fx.Node], kernel: fx.Node, weights: Container[fx.Node], aside: Container[fx.Node]
) -> fx.Node:
    """Return the first operator of the layer of a kernel, given the stretch of operators before the kernel.

    If collectives of the layer stand there, it is the layer's first operator in the stretch. Otherwise it is the
    kernel, or the first of the operators right before it that only recompute its operands.
    """
    place = place_of(kernel)
    layer_nodes = [n for n in stretch if place_of(n) == place and n not in aside and not is_view(n)]
    if any(travels(n) and (n in weights or place[0] == "backward") for n in layer_nodes):
        return next((n for n in layer_nodes if n not in weights), layer_nodes[0])
    recomputed = takewhile(lambda n: is_view(n) or ir.is_recomputed(n) and not travels(n), reversed(stretch))
    return [kernel, *recomputed][-1]


def travels(node: fx.Node) -> bool:
    """Return True if a node starts a collective or waits for one."""
    return kind_of(node) is not None or node.target in WAITS


def after_kernels(program: ir.Program, kernels: Container[fx.Node]) -> set[fx.Node]:
    """Return the operators after the last kernel of forward and backward."""
    return set(takewhile(lambda n: n not in kernels or ir.phase(n) == "optimizer", reversed(list(program.calls()))))


# ---- work for other layers --------------------------------------------------------------------------


def roles_aside(program: ir.Program, kernels: Container[fx.Node]) -> dict[fx.Node, Role]:
    """Return the nodes that may belong to another layer than the one they stand in, and their roles.

    These are the inputs and starts of parameter all-gathers, the starts of gradient reductions, and all that follows
    the latter. A gradient's node right before a kernel of its own layer is not aside.
    """
    aside = dict[fx.Node, Role]()
    for node in reversed(weight_nodes(program)):
        if kind_of(node) or any(user in aside for user in node.users):
            aside[node] = Role("prefetch", *place_of(node))
    tails = gradient_tails(program, kernels)
    arrived = after_waits(program, tails)
    next_layer = None  # the layer of the next kernel
    for node in reversed(list(program.calls())):
        if node in kernels:
            next_layer = ir.layer(node)
        elif node in tails and (node in arrived or kind_of(node)) and ir.layer(node) != next_layer:
            aside[node] = Role("late", "backward", ir.layer(node))
    return aside


def gradient_tails(program: ir.Program, kernels: Container[fx.Node]) -> set[fx.Node]:
    """Return the nodes of gradients of parameters: those of the backward that lead to no kernel, or sum replicas."""
    tails, backward = set[fx.Node](), False
    for node in reversed(list(program.calls())):
        if node in kernels:
            backward |= ir.phase(node) == "backward"
        elif (backward or ir.phase(node) == "backward") and ir.phase(node) != "forward" and leaves(node, tails):
            tails.add(node)
    return tails


def leaves(node: fx.Node, tails: Container[fx.Node]) -> bool:
    """Return True if all users of a node of the backward are tails, the optimizer or the output."""
    return all(user in tails or user.op == "output" or ir.phase(user) == "optimizer" for user in node.users)


def after_waits(program: ir.Program, tails: Container[fx.Node]) -> set[fx.Node]:
    """Return waits, views and copies of their results, and all operators on reduced gradients."""
    following = set[fx.Node]()
    for node in program.calls():
        operands = node.all_input_nodes
        follows = operands and following.issuperset(operands) and (node in tails or lays_out(node))
        if node.target in WAITS or follows:
            following.add(node)
    return following


def lays_out(node: fx.Node) -> bool:
    """Return True if an operator yields its operand's entries, in its memory or in a copy."""
    return not is_operator(node) or may_alias(node) or name_of(node) in COPIES  # no operator: an item of a tuple
