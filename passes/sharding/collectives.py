"""Write the boundary operators as functional collectives of the axis-named groups.

    psum(x, "tp")   ->   wait_tensor(all_reduce(x, "sum", "tp"))

The definitions are those of `passes/program/boundary.py`, and of `routed.py` for what moves rows to their experts.
After this pass no boundary operator is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from passes.program import ir
from passes.program.boundary import EXPANSIONS
from passes.program.functions import body_of, results_of
from passes.program.rewrite import inline_alike
from passes.program.routed import EXPANSIONS as ROUTED

DEFINITIONS = {**EXPANSIONS, **ROUTED}


def _contiguous(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The definition with the memory layout that the operator promised: contiguous."""
    return lambda *args: body(*args).contiguous()


def erase_unread(nodes: Sequence[fx.Node]) -> None:
    """Remove those that nothing reads, which come in order: gradients that a body makes with its result, say."""
    for node in reversed(nodes):
        if not node.users and not node.is_impure():
            node.graph.erase_node(node)


@dataclass(frozen=True)
class Expand:
    """Replace every boundary operator by its collectives."""

    name: str = "collectives"
    requires: frozenset[str] = frozenset({"local"})
    establishes: frozenset[str] = frozenset({"collectives"})

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(body_of(node) or node.target in DEFINITIONS for node in program.calls()):
            return program, ir.Report()
        program = program.copy()
        counts: Counter[str] = Counter()
        for node in list(program.calls()):
            if body := body_of(node):
                erase_unread(inline_alike(node, results_of(body), ctx))
        for node in list(program.calls()):
            if node.target in EXPANSIONS:
                counts[node.target._opname] += 1
            if definition := DEFINITIONS.get(node.target):
                inline_alike(node, _contiguous(definition), ctx)
        program.module.recompile()
        return replace(program, facts=program.facts | self.establishes), ir.Report(dict(counts))
