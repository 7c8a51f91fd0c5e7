"""Add partial sums before they are reduced: one collective instead of two.

    reduce_scatter(a) + reduce_scatter(b)   ->   reduce_scatter(a + b)

Gradients of an activation that several operators use meet in such sums, and so do parallel branches of a layer. Sums
are rounded in another order than before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir import ir
from passes.ir.stages import Stage
from passes.ops import reshard
from passes.trace.editor import Editor, replace_by


@dataclass(frozen=True)
class Reassociate(ir.Pass):
    """Reduce sums of reduced values once."""

    name = "reassociate"
    takes = (Stage.JOINT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(map(reductions_of_sum, program.calls())):
            return program, ir.Report()
        program = program.copy()
        counts: Counter[str] = Counter()
        for node in list(program.calls()):
            if reductions := reductions_of_sum(node):
                counts[reshard.RESHARD_OPS[reductions[0].target].name] += 1
                reduce_sum(node, reductions, ctx)
        program.module.recompile()
        return program, ir.Report(dict(counts))


def reductions_of_sum(node: fx.Node) -> list[fx.Node]:
    """Return the two reductions that a node adds, if only their operands differ and it is the only user of both."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(set(node.all_input_nodes)) != 2:
        return []
    a, b = node.all_input_nodes
    compatible = a.target is b.target and reshard.sums(a.target) and a.args[1:] == b.args[1:]
    if not compatible or len(a.users) > 1 or len(b.users) > 1:
        return []
    x, y = (ir.example(r.args[0]) for r in (a, b))  # type: ignore[arg-type]
    return [a, b] if (x.shape, x.dtype) == (y.shape, y.dtype) else []


def reduce_sum(node: fx.Node, reductions: list[fx.Node], ctx: ir.Context) -> None:
    """Replace a sum of two reductions by the reduction of a sum."""
    a, b = reductions
    edit = Editor(ctx, node.graph, node, a)
    total = edit.call(torch.ops.aten.add.Tensor, (a.args[0], b.args[0]))
    reduced = edit.call(a.target, (total, *a.args[1:]))
    ir.set_spec(total, ir.spec(a.args[0]))  # type: ignore[arg-type]
    ir.set_spec(reduced, ir.spec(node))
    replace_by(node, reduced)
    for old in (a, b):
        node.graph.erase_node(old)
