"""Check that values which must be equal on all ranks of an axis are so, from a finished program.

A value may differ by rank on an axis if it is computed from shards, partial sums or the rank's own coordinate there;
gathering or reducing it over the axis makes it equal again. Each full copy that a program stores or returns must be
equal on all ranks: an unreduced gradient, or a norm that leaves out an axis, would let the copies of a parameter drift
apart.

A sum over ranks must not be summed over them again. (Other equal values may be summed: they may be shares.) The check
cannot tell if the terms are the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import axis_of, is_view, kind_of
from passes.ops.reshard import RESHARD_OPS

Finding = tuple[fx.Node | None, str]
Axes = frozenset[str]
COPY = torch.ops.aten.copy_.default
UNITES = ("all_gather", "all_reduce")  # collectives that make a value equal on all ranks of the axis
COPIES = ("invariant", "replicate")


def resummed_axes(node: fx.Node, mesh: Mesh) -> set[str]:
    """Return the axes over which a node sums a value that is already a sum over them, or a view of one."""
    operand = node.args[0]
    while isinstance(operand, fx.Node) and is_view(operand):
        operand = operand.args[0]
    record = RESHARD_OPS.get(operand.target) if isinstance(operand, fx.Node) else None
    is_sum = record is not None and record.reduces == "sum"
    return set(communication_axes(operand, mesh)) & set(communication_axes(node, mesh)) if is_sum else set()  # type: ignore[arg-type]


def check_copies(program: ir.Program) -> Iterator[Finding]:
    """Yield stored or returned full copies that may differ between ranks, and repeated sums over ranks."""
    differs: dict[fx.Node, Axes] = {}
    copies: dict[fx.Node, tuple[str, Axes]] = {}  # input -> (description, axes on which it is a copy)
    for node, input_ in zip(program.placeholders(), program.inputs, strict=True):
        sharded = {axis for axis in program.mesh.axes if input_.spec.state(axis) in ("shard", "partial")}
        rank_axes = {"coordinate": program.mesh.over(input_.name), "layout": input_.spec.replicate}.get(input_.kind, ())
        differs[node] = frozenset(sharded.union(rank_axes))
        copies[node] = f"{input_.kind} {input_.name!r}", frozenset(program.mesh.axes) - sharded
    for node in program.calls():
        operands = node.all_input_nodes[:1] if returns_operand(node) else node.all_input_nodes
        before = frozenset().union(*(differs[n] for n in operands))
        differs[node] = differing_axes(node, before, program.mesh)
        record = RESHARD_OPS.get(node.target)
        if record is not None and record.reduces == "sum" and (repeated := resummed_axes(node, program.mesh) - before):
            yield node, f"sums over {', '.join(sorted(repeated))} a value that is already a sum over them"
        target = node.args[0] if node.args else None
        if is_store(node) and target in copies:
            description, copy_axes = copies[target]  # type: ignore[index]
            yield from report_difference(node, description, differs[node.args[1]] & copy_axes)  # type: ignore[index]
    for node, output in zip(program.results(), program.outputs, strict=True):
        copy_axes = frozenset(a for a in program.mesh.axes if output.spec.state(a) in ("invariant", "replicate"))
        yield from report_difference(node, f"{output.kind} {output.name!r}", differs[node] & copy_axes)


def differing_axes(node: fx.Node, before: Axes, mesh: Mesh) -> Axes:
    """Return the axes on whose ranks a node's value may differ, given those of its operands."""
    axis = axis_of(node)
    if axis is None:
        return before
    _, inner, outer = mesh.part(axis)
    if kind_of(node) in UNITES:
        return before.difference(mesh.over(axis)) if inner == outer == 1 else before
    return before if returns_operand(node) else before.union(mesh.over(axis))


def communication_axes(node: fx.Node, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that an operator communicates over."""
    return mesh.over(axis_of(node) or "")


def returns_operand(node: fx.Node) -> bool:
    """Return True if a node returns its first operand; the rank's coordinate is then only for the gradient."""
    record = RESHARD_OPS.get(node.target)
    return record is not None and record.kind is None and record.gives in COPIES


def is_store(node: fx.Node) -> bool:
    """Return True if a node stores its second operand into its first."""
    return node.target is COPY


def report_difference(node: fx.Node, value: str, axes: Axes) -> Iterator[Finding]:
    """Yield a finding if `axes` is not empty."""
    if axes:
        yield node, f"{value} is a full copy on every rank of {', '.join(sorted(axes))}, but may differ there"
