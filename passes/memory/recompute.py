"""Activation checkpointing: recompute forward values where the backward needs them.

    y = silu(x)                     y = silu(x)
    z = mm(y, w)                    z = mm(y, w)
    g = mm(dz, t(w))                g = mm(dz, t(w))
    dx = silu_backward(g, x)        dx = silu_backward(g, x)
    dw = mm(t(y), dz)               y_1 = silu(x)
                                    dw = mm(t(y_1), dz)

In the backward, every use of a value that need not be kept becomes a use of a clone, computed from kept values. A clone
is made once and put right before its first use: a layer is recomputed when its backward begins.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.operators import is_operator, is_random, is_view, kind_of, name_of
from passes.ir.slices import reach
from passes.ops import reshard
from passes.trace.functions import communicates

SELECTIONS = frozenset({"argmax", "argmin", "argsort", "sort", "topk"})  # operators by name that choose entries

# ---- nodes that may run twice --------------------------------------------------------------------


def reason_to_run_once(node: fx.Node) -> str | None:
    """Return the reason why an operator must not run twice, None if it may; an item of a tuple goes with the tuple."""
    if node.target is operator.getitem:
        return reason_to_run_once(node.args[0])  # type: ignore[arg-type]
    if not is_operator(node):
        return "not an operator"
    if kind_of(node) or communicates(node) or node.target.namespace == "_c10d_functional":
        return "communication"
    if selects(node):
        return "selection"
    return "random" if is_random(node) else None


def selects(node: fx.Node) -> bool:
    """Return True if an operator chooses entries by floating-point values.

    If ties or rounding fell another way the second time, the backward would be that of another choice.
    """
    return name_of(node) in SELECTIONS and ir.example(node.all_input_nodes[0]).is_floating_point()


def sent_nodes(program: ir.Program) -> set[fx.Node]:
    """Return forward nodes that another pipeline stage reads, directly or by a view.

    A stage keeps the values that it received. The nodes include buffers as they were before a forward that changes
    them.
    """
    changed = {output.name for output in program.outputs if output.kind == "buffer"}
    buffers = {n for n, i in zip(program.placeholders(), program.inputs) if i.kind == "buffer" and i.name in changed}
    nodes = {u for n in buffers for u in n.users if u.op == "call_function" and ir.pipeline_stage(u) is not None}
    for node in reversed(list(program.calls())):
        stage = ir.pipeline_stage(node)
        if stage is None or ir.phase(node) != "forward":
            continue
        readers = [user for user in node.users if user.op == "call_function" and ir.phase(user) == "forward"]
        is_sent = any(ir.pipeline_stage(user) not in (None, stage) for user in readers)
        if is_sent or any(user in nodes and does_nothing(user) for user in readers):
            nodes.add(node)
    return nodes


def does_nothing(node: fx.Node) -> bool:
    """Return True if an operator yields its operand unchanged."""
    return is_view(node) or node.target is reshard.invariant_to_replicate


# ---- the rewrite -----------------------------------------------------------------------------------


def recompute(program: ir.Program, chosen: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Let the backward use clones of `chosen` forward nodes; changes the graph, returns node -> clone."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    clones: dict[fx.Node, fx.Node] = {}

    def missing(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in chosen and n not in clones]

    for user in list(program.calls()):
        if ir.phase(user) != "backward":
            continue
        for node in sorted(reach(missing(user), missing), key=order.__getitem__):
            clones[node] = clone(node, user, clones)
        for node in user.all_input_nodes:
            user.replace_input_with(node, clones.get(node, node))
    program.graph.eliminate_dead_code()
    program.module.recompile()
    return clones


def clone(node: fx.Node, user: fx.Node, clones: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of the node, right before the user and in the backward, on operands that are cloned already."""
    with node.graph.inserting_before(user):
        new = node.graph.node_copy(node, lambda n: clones.get(n, n))
    ir.update(new, phase="backward", recomputed=True)
    return new


# ---- kept values ------------------------------------------------------------------------------------


def storages(node: fx.Node) -> list[torch.UntypedStorage]:
    """Return the memory of the tensors that a node computes; views share that of their base."""
    val = ir.value(node)
    return [v.untyped_storage() for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, Tensor)]


def saved_nodes(program: ir.Program) -> list[fx.Node]:
    """Return forward nodes that the backward reads."""
    return [
        node
        for node in program.calls()
        if ir.phase(node) == "forward"
        and any(user.op != "output" and ir.phase(user) == "backward" for user in node.users)
    ]


def saved_bytes(program: ir.Program, weights: Iterable[fx.Node] = ()) -> int:
    """Return the bytes of forward values of all layers that live into the backward, except inputs and `weights`.

    Views count once.
    """
    others = {id(s) for node in (*program.placeholders(), *weights) for s in storages(node)}
    sizes = {id(s): s.nbytes() * program.times(node) for node in saved_nodes(program) for s in storages(node)}
    return sum(size for storage, size in sizes.items() if storage not in others)
