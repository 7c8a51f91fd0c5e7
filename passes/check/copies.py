"""Is what ought to be the same on every rank of an axis the same? Read from a finished program, forward to updates.

A value may differ by rank on an axis if it is computed from shards, partial sums or the rank's own coordinate there;
gathering or reducing it over the axis makes it one value again. What a program stores or returns as a full copy must
be one: a gradient that is not reduced, or a norm that leaves out an axis, lets the copies of a parameter drift apart.
A sum over ranks of a sum over them was complete before. (What is the same on all of them may well be a share of each.)
That terms are those of the sum, this does not tell.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from passes.program import ir
from passes.program.mesh import Mesh
from passes.program.operators import axis_of, is_view, kind_of
from passes.program.reshard import RESHARD_OPS

Finding = tuple[fx.Node | None, str]
Axes = frozenset[str]
COPY = torch.ops.aten.copy_.default
UNITES = ("all_gather", "all_reduce")  # afterwards every rank of the axis has the same
COPIES = ("invariant", "replicate")


def summed(node: fx.Node, mesh: Mesh) -> set[str]:
    """The axes over which a sum is taken of what is itself a sum over them, or a view of one."""
    operand = node.args[0]
    while isinstance(operand, fx.Node) and is_view(operand):
        operand = operand.args[0]
    record = RESHARD_OPS.get(operand.target) if isinstance(operand, fx.Node) else None
    is_sum = record is not None and record.reduces == "sum"
    return set(over(operand, mesh)) & set(over(node, mesh)) if is_sum else set()  # type: ignore[arg-type]


def check_copies(program: ir.Program) -> Iterator[Finding]:
    """Full copies, stored or returned, that may differ between the ranks of an axis; sums over ranks of one value."""
    differs: dict[fx.Node, Axes] = {}
    copies: dict[fx.Node, tuple[str, Axes]] = {}  # inputs that are stored into: what they are, where they are copies
    for node, given in zip(program.placeholders(), program.inputs, strict=True):
        own = {axis for axis in program.mesh.axes if given.spec.state(axis) in ("shard", "partial")}
        apart_on = {"coordinate": program.mesh.over(given.name), "layout": given.spec.replicate}.get(given.kind, ())
        differs[node] = frozenset(own.union(apart_on))
        copies[node] = f"{given.kind} {given.name!r}", frozenset(program.mesh.axes) - own
    for node in program.calls():
        read = node.all_input_nodes[:1] if keeps(node) else node.all_input_nodes
        before = frozenset().union(*(differs[n] for n in read))
        differs[node] = after(node, before, program.mesh)
        record = RESHARD_OPS.get(node.target)
        if record is not None and record.reduces == "sum" and (twice := summed(node, program.mesh) - before):
            yield node, f"adds up over {', '.join(sorted(twice))} what is the same on all ranks there: a sum over them"
        target = node.args[0] if node.args else None
        if writes(node) and target in copies:
            what, same = copies[target]  # type: ignore[index]
            yield from apart(node, what, differs[node.args[1]] & same)  # type: ignore[index]
    for node, output in zip(program.results(), program.outputs, strict=True):
        same = frozenset(a for a in program.mesh.axes if output.spec.state(a) in ("invariant", "replicate"))
        yield from apart(node, f"{output.kind} {output.name!r}", differs[node] & same)


def after(node: fx.Node, before: Axes, mesh: Mesh) -> Axes:
    """The axes on whose ranks a node's value may differ, given those of its operands."""
    axis = axis_of(node)
    if axis is None:
        return before
    _, inner, outer = mesh.part(axis)
    if kind_of(node) in UNITES:
        return before.difference(mesh.over(axis)) if inner == outer == 1 else before
    return before if keeps(node) else before.union(mesh.over(axis))


def over(node: fx.Node, mesh: Mesh) -> tuple[str, ...]:
    """The axes that an operator communicates over."""
    return mesh.over(axis_of(node) or "")


def keeps(node: fx.Node) -> bool:
    """Whether a node gives back its first operand; the rank's coordinate is for the gradient."""
    record = RESHARD_OPS.get(node.target)
    return record is not None and record.kind is None and record.gives in COPIES


def writes(node: fx.Node) -> bool:
    """Whether a node stores its second operand into its first."""
    return node.target is COPY


def apart(node: fx.Node, what: str, axes: Axes) -> Iterator[Finding]:
    """The finding, where there are axes."""
    if axes:
        yield node, f"{what} is a full copy on every rank of {', '.join(sorted(axes))}, where this value may differ"
