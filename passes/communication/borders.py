"""Where layers begin in a program whose collectives are written out, and what of other layers stands in them.

    add(x, mm)                         layer 0
    start gather of layer 2            aside
    norm, wait for gather of layer 1   layer 1: its parameters are gathered, so it begins at its first operator
    mm                                 without that it begins here, and its norm runs in one kernel with layer 0's sum

What is aside is no part of the layer that it stands in: `overlap` puts it where layers begin, `segment` writes it as
pieces of its own. So layers are alike, whatever starts or arrives while they are computed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile

from torch import fx

from passes.cost.accounting import count_flops
from passes.cost.fusion import ALONE, WAITS
from passes.program import ir
from passes.program.operators import is_operator, is_view, kind_of, may_alias, name_of
from passes.program.regions import layer_paths, region_of, regions, weight_nodes
from passes.program.sweep import recorded

COPIES = frozenset({"clone", "_to_copy"})
Place = tuple[str, str]  # a phase, and a layer or none


def products_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Matrix products and attentions, with their FLOPs."""
    sizes = recorded()
    return {node: count for node in graph.nodes if node.op == "call_function" and (count := count_flops(node, sizes))}


def kernels_of(program: ir.Program) -> set[fx.Node]:
    """Operators that run as a kernel of their own: products, attentions, sorts, scatters."""
    alone = (n for n in program.calls() if name_of(n) in ALONE)
    return {*products_of(program.graph), *alone}


def layers_of_work(program: ir.Program) -> dict[fx.Node, str]:
    """The layer of each operator; of what updates a parameter, that of the parameter."""
    layers = layer_paths(given.name for given in program.inputs if given.kind == "parameter")
    return {node: region_of(ir.parameter(node), layers) or region for node, region in regions(program).items()}


# ---- where layers begin -----------------------------------------------------------------------------


def begins_of(program: ir.Program, kernels: Container[fx.Node]) -> dict[fx.Node, Place]:
    """The first node of each layer in each phase, and of what comes after layers."""
    layers, weights, aside = regions(program), set(weight_nodes(program)), places_aside(program, kernels)
    found: dict[fx.Node, Place] = {}
    seen, here = set[Place](), ("", "")
    stretch: list[fx.Node] = []  # since the last kernel
    for node in program.calls():
        if node in kernels and ir.phase(node) != "optimizer":
            place = (ir.phase(node), layers[node])
            if place not in seen or place != here and not place[1]:
                own = [n for n in stretch if (ir.phase(n), layers[n]) == place and n not in aside and not is_view(n)]
                tied = any(travels(n) and (n in weights or place[0] == "backward") for n in own)
                first = next((n for n in own if n not in weights), own[0]) if tied else computed_again(stretch, node)
                found[first] = here = place
                seen.add(place)
            stretch = []
        else:
            stretch.append(node)
    return found


def computed_again(stretch: Sequence[fx.Node], kernel: fx.Node) -> fx.Node:
    """The first of the operators before a kernel that only make again, from what was kept, what it reads."""
    again = takewhile(lambda n: is_view(n) or ir.is_recomputed(n) and not travels(n), reversed(stretch))
    return [kernel, *again][-1]


def travels(node: fx.Node) -> bool:
    """Whether a node starts a collective or waits for one."""
    return kind_of(node) is not None or node.target in WAITS


# ---- what is aside ----------------------------------------------------------------------------------


def places_aside(program: ir.Program, kernels: Container[fx.Node]) -> dict[fx.Node, Place]:
    """What gathers of parameters send and their starts, starts of reductions of gradients, and what follows these.

    What of it stands before a kernel of its own layer is not aside.
    """
    layers, found = layers_of_work(program), dict[fx.Node, Place]()
    for node in reversed(weight_nodes(program)):
        if kind_of(node) or any(user in found for user in node.users):
            found[node] = (ir.phase(node), layers[node])
    tails = gradient_tails(program, kernels)
    arrived = after_waits(program, tails)
    following = ""  # the layer of the next kernel
    for node in reversed(list(program.calls())):
        if node in kernels:
            following = layers[node]
        elif node in tails and (node in arrived or kind_of(node)) and layers[node] != following:
            found[node] = ("gradients", layers[node])
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
