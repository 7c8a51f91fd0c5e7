"""A program of calls must be the program that was cut: put in line again, it reads the same."""

from __future__ import annotations

import operator
from itertools import zip_longest

from torch import fx

from passes.program import ir
from passes.program.bodies import flatten, is_site
from passes.program.operators import is_view
from passes.program.printer import format_node


def verify_composed(step: str, before: ir.Program, after: ir.Program) -> ir.Program:
    """The program that calls stand for, itself if there are none.

    Raises CompileError unless the bodies, in place of their calls, give the program before: its nodes in its order.
    Views, parts of tuples and numbers of places may stand elsewhere: nothing happens there.
    """
    flat = flatten(after)
    if flat is after:
        return after
    (old, old_views), (new, new_views) = lines_of(before), lines_of(flat)
    unread = old_views.keys() - new_views.keys()
    views = [(line, new_views.get(name, line)) for name, line in old_views.items() if name not in unread]
    for was, found in (*zip_longest(old, new, fillvalue="nothing"), *views):
        if was != found:
            message = f"its calls do not give the program that was cut:\n  it was {was}\n  it is  {found}"
            raise ir.CompileError(step, None, message)
    return flat


def lines_of(program: ir.Program) -> tuple[list[str], dict[str, str]]:
    """The lines of nodes in order, and those of views and of parts of tuples by name."""
    lines, aside = [], {}
    for node in program.graph.nodes:
        if node.op == "call_function" and (is_view(node) or is_part(node) or is_site(node)):
            aside[node.name] = format_node(node)
        else:
            lines.append(format_node(node))
    return lines, aside


def is_part(node: fx.Node) -> bool:
    """Whether a node takes a tuple apart."""
    return node.target is operator.getitem
