"""Check that a segmented program, with its calls inlined, equals the program it was cut from."""

from __future__ import annotations

import operator
from itertools import zip_longest

from torch import fx

from passes.check.verify import WrongProgram
from passes.ir import ir
from passes.ir.bodies import flatten, is_site, same_layout
from passes.ir.operators import is_view
from passes.ir.printer import format_node
from passes.ir.record import differences


def verify_composed(step: str, before: ir.Program, after: ir.Program) -> ir.Program:
    """Return the program with its calls inlined (itself if it has none).

    Raises CompileError unless the inlined bodies give the program before: its nodes, with their records, in its order.
    Views, elements of tuples and site numbers may be elsewhere, because they compute nothing.
    """
    flat = flatten(after)
    if flat is after:
        return after
    (old, old_views), (new, new_views) = nodes_of(before), nodes_of(flat)
    views = [(node, new_views[name]) for name, node in old_views.items() if name in new_views]
    for old_node, new_node in (*zip_longest(old, new), *views):
        old_text, new_text = (format_node(node) if node else "nothing" for node in (old_node, new_node))
        if old_text != new_text:
            message = f"its calls do not give the program that was cut:\n  it was {old_text}\n  it is  {new_text}"
            raise WrongProgram(step, None, message, verify_composed.__name__)
        if names := differences(ir.record(old_node), ir.record(new_node), same_layout):
            message = f"its calls do not give the program that was cut: of {old_text}, they change {', '.join(names)}"
            raise WrongProgram(step, old_node, message, verify_composed.__name__)
    return flat


def nodes_of(program: ir.Program) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """Return (nodes in order; views, elements of tuples and site numbers by name)."""
    nodes, views = [], {}
    for node in program.graph.nodes:
        if node.op == "call_function" and (is_view(node) or is_part(node) or is_site(node)):
            views[node.name] = node
        else:
            nodes.append(node)
    return nodes, views


def is_part(node: fx.Node) -> bool:
    """Return True if a node takes an element of a tuple."""
    return node.target is operator.getitem
