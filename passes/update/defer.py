"""Reduce gradients once per step instead of once per microbatch: the ranks' own terms are accumulated.

    g = reduce_scatter(mm(...), "dp_shard")       g   w's placement
becomes
    g = mm(...)                                   g   full, partial over dp_shard

A sum over microbatches and a sum over ranks can be exchanged: the accumulator holds a rank's own terms, in the dtype of
the gradient, and the update completes it (`ApplyOnly`). It is as large as the gathered parameter; each gradient is sent
once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import CASTS, name_of
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.trace.editor import Editor
from passes.update.appender import Appender


@dataclass(frozen=True)
class Defer(ir.Pass):
    """Return each gradient as it is before the last sums over ranks."""

    name = "defer"
    takes = (Stage.JOINT,)
    after = ("simplify", "cse", "reassociate")  # these leave one reduction per gradient

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        edit = Editor(ctx, program.graph)
        results, outputs, deferred, total = list[fx.Node](), list[ir.Output](), 0, 0
        layers = {item.name: item.layer for item in program.inputs}
        for node, output in zip(program.results(), program.outputs, strict=True):
            count = program.layers(layers.get(output.name))
            steps = list(reductions(node)) if output.kind == "gradient" else []
            term, spec = terms(node, output.spec, steps, program.mesh)
            total += count * (output.kind == "gradient")
            if term is not node:
                term, deferred = in_dtype(edit, term, node), deferred + count
                ir.set_spec(term, spec)
            results.append(term)
            outputs.append(replace(output, spec=spec))
        program.graph.output_node().args = (tuple(results),)
        program.graph.eliminate_dead_code()
        program.module.recompile()
        effect = ir.Effect("passes.accumulate.reduce", deferred, "gradients reduced once a step", total)
        effects = (effect,) if deferred else ()
        return replace(program, outputs=tuple(outputs)), ir.Report({"deferred": deferred}, effects=effects)


def reductions(gradient: fx.Node) -> Iterator[fx.Node]:
    """Yield the casts and sums over ranks that end in a gradient, the last first."""
    node = gradient
    while len(node.users) == 1 and (name_of(node) in CASTS or reshard.sums(node.target)):
        yield node
        node = node.args[0]  # type: ignore[assignment]


def terms(gradient: fx.Node, spec: Spec, steps: Sequence[fx.Node], mesh: Mesh) -> tuple[fx.Node, Spec]:
    """Return the operand of these sums, and its placement."""
    node = gradient
    for step in steps:
        if reshard.sums(step.target):
            before = placement_before(step, spec, mesh)
            if before is None:
                break
            node, spec = step.args[0], before  # type: ignore[assignment]
    return node, spec


def placement_before(node: fx.Node, after: Spec, mesh: Mesh) -> Spec | None:
    """Return the placement of a sum's operand if the result is placed as `after`; None if it is unknown."""
    a = reshard.RESHARD_OPS[node.target].named(node.args[1:])
    if a.axis not in mesh.names:
        return None
    partial = (*((axis, "sum") for axis in mesh.over(a.axis)), *after.partial)
    if node.target is reshard.psum:
        return replace(after, partial=partial)
    if node.target is not reshard.reduce_scatter:
        return None
    factors = after.dims[a.dim]
    sharded = [f for f in factors if f.axes[-1:] == (a.axis,)]
    if len(factors) != 1 or not sharded:
        return None
    full = (replace(sharded[0], axes=sharded[0].axes[:-1]),)
    return replace(after, dims=(*after.dims[: a.dim], full, *after.dims[a.dim + 1 :]), partial=partial)


def in_dtype(edit: Editor, term: fx.Node, gradient: fx.Node) -> fx.Node:
    """Return the term in the dtype of its gradient."""
    dtype = ir.example(gradient).dtype
    if ir.example(term).dtype == dtype:
        return term
    output = gradient.graph.output_node()
    return edit.moved_to(output, gradient).trace(lambda x: x.to(dtype), term, key=("to", dtype))


def complete(
    append: Appender, total: fx.Node, before: Spec, after: Spec, mesh: Mesh, reduce_dtype: torch.dtype | None
) -> fx.Node:
    """Return a total, placed as `before`, summed over ranks to the placement `after`.

    Terms are sent as `reduce_dtype` (None: unchanged).
    """
    dtype, remaining = ir.example(total).dtype, [axis for axis in before.partial_axes if axis not in after.partial_axes]

    def put(op: Any, *args: Any) -> fx.Node:
        return append.trace(lambda x: op(x, *args, dtype, reduce_dtype), total, key=(op, *args))

    for dim, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        for axis in (axis for factor in new for axis in factor.axes if not any(axis in f.axes for f in old)):
            total = put(reshard.reduce_scatter, dim, axis, mesh[axis])
            remaining = [other for other in remaining if other not in mesh.over(axis)]
    for axis in mesh.flatten(remaining):
        total = put(reshard.psum, axis)
    return total
