"""Write the reshard operators as functional collectives over the process groups named after mesh axes.

    psum(x, "tp")   ->   wait_tensor(all_reduce(x, "sum", "tp"))

The definitions are in `passes/ops/reshard.py`, and in `routed.py` for operators that move rows to their experts.
After this pass no reshard operator is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.stages import Stage
from passes.ops.reshard import RESHARD_OPS
from passes.ops.routed import EXPANSIONS as ROUTED
from passes.trace.editor import inline
from passes.trace.functions import body_of, results_of


def definition_of(node: fx.Node) -> Callable[..., Tensor] | None:
    """Return an operator's definition in functional collectives; None if it is not a reshard operator."""
    record = RESHARD_OPS.get(node.target)
    return record.body if record else ROUTED.get(node.target)


def _contiguous(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a definition so that its result is contiguous, as the operator promises."""
    return lambda *args: body(*args).contiguous()


def put_in_line(program: ir.Program, ctx: ir.Context) -> None:
    """Replace operators that stand for a body by that body, without the parts whose results are unused.

    The bodies that a body calls, one for each chunk, become layers: `NAME.0`, `NAME.1`, and so on.
    """
    inserted, numbers = set[fx.Node](), Counter[str]()
    waiting = [node for node in program.calls() if body_of(node)]
    while waiting:
        node = waiting.pop(0)
        nodes = inline(node, results_of(body_of(node)), ctx, alike=True)  # type: ignore[arg-type]
        inner = [n for n in nodes if body_of(n)]
        for call in inner:
            name = call.target._opname.rpartition("_")[0]  # type: ignore[union-attr]
            ir.update(call, layer=Layer(name, numbers[name]))
            numbers[name] += 1
        inserted.update(nodes)
        waiting = inner + waiting
    for node in reversed(list(program.calls())):
        if node in inserted and not node.users and not node.is_impure():
            program.graph.erase_node(node)


@dataclass(frozen=True)
class Collectives(ir.Pass):
    """Replace every reshard operator by its collectives."""

    name = "collectives"
    takes = (Stage.LOCAL, Stage.JOINT, Stage.STEP, Stage.BUCKETED)
    gives = Stage.EXPLICIT

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(body_of(node) or definition_of(node) for node in program.calls()):
            return program, ir.Report()
        program = program.copy()
        counts: Counter[str] = Counter()
        put_in_line(program, ctx)
        for node in list(program.calls()):
            if node.target in RESHARD_OPS:
                counts[RESHARD_OPS[node.target].name] += 1
            if definition := definition_of(node):
                inline(node, _contiguous(definition), ctx, alike=True)
        program.module.recompile()
        return program, ir.Report(dict(counts))
