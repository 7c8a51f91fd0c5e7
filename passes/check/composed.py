"""Check that a segmented program, with its calls inlined, equals the program it was cut from."""

from __future__ import annotations

import operator
from itertools import zip_longest

from torch import fx

from passes.check.verify import WrongProgram
from passes.program import ir
from passes.program.bodies import flatten, is_site, same_layout
from passes.program.operators import is_view
from passes.program.printer import format_node
from passes.program.record import differences


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
    for one, other in (*zip_longest(old, new), *views):
        was, now = (format_node(node) if node else "nothing" for node in (one, other))
        if was != now:
            message = f"its calls do not give the program that was cut:\n  it was {was}\n  it is  {now}"
            raise WrongProgram(step, None, message, verify_composed.__name__)
        if names := differences(ir.record(one), ir.record(other), same_layout):
            message = f"its calls do not give the program that was cut: of {was}, they change {', '.join(names)}"
            raise WrongProgram(step, one, message, verify_composed.__name__)
    return flat


def nodes_of(program: ir.Program) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """Return (nodes in order; views, elements of tuples and site numbers by name)."""
    nodes, aside = [], {}
    for node in program.graph.nodes:
        if node.op == "call_function" and (is_view(node) or is_part(node) or is_site(node)):
            aside[node.name] = node
        else:
            nodes.append(node)
    return nodes, aside


def is_part(node: fx.Node) -> bool:
    """Return True if a node takes an element of a tuple."""
    return node.target is operator.getitem
