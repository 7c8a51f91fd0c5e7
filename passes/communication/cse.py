"""Common subexpression elimination: compute once the same operator on the same operands in the same layer and phase.

    q = all_gather(to_float8(x)) @ wq            g = all_gather(to_float8(x))
    k = all_gather(to_float8(x)) @ wk     ->     q, k = g @ wq, g @ wk

Layers that are written separately do not know what they share: projections of one activation that each quantize and
gather it, gradients that each transpose it. Nothing is shared across layers and phases, because a shared value stays in
memory from its first use to its last.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.ir import ir
from passes.ir.operators import is_random, kind_of
from passes.ir.printer import op_name
from passes.ir.stages import Stage


@dataclass(frozen=True)
class CSE(ir.Pass):
    """Replace every operator that repeats an earlier one by the earlier one."""

    name = "cse"
    takes = (Stage.JOINT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        first: dict[Any, fx.Node] = {}
        counts: Counter[str] = Counter()
        notes = []
        for node in list(program.calls()):
            if is_random(node):
                continue
            key = node.target, ir.layer(node), ir.phase(node), signature(node.args), signature(node.kwargs)
            earlier = first.setdefault(key, node)
            if earlier is not node:
                if kind_of(node):
                    notes.append(f"%{node.name} ({ir.source(node)}): travels once, as %{earlier.name}")
                counts[op_name(node.target)] += 1
                node.replace_all_uses_with(earlier)
                program.graph.erase_node(node)
        program.module.recompile()
        return program, ir.Report(dict(counts), tuple(notes))


def signature(tree: Any) -> Any:
    """Return a hashable form of arguments, in which 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(tree, (tuple, list)):
        return tuple(map(signature, tree))
    if isinstance(tree, dict):
        return tuple((key, signature(value)) for key, value in tree.items())
    if isinstance(tree, slice):
        return "slice", signature((tree.start, tree.stop, tree.step))
    if isinstance(tree, fx.Node):
        return tree
    return type(tree), repr(tree) if isinstance(tree, (float, complex)) else tree
