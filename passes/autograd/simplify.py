"""Simplify autograd's formulas by algebra, bit for bit, before memory is counted.

    t(t(x))                                  ->  x
    mul(pow(x, 1.0), 2.0)                    ->  mul(x, 2.0)
    mul(div(expand(s), 256), mul(x, 2.0))    ->  mul(expand(div(s, 128.0)), x)

Numbers stay the same to the last bit: a factor that is a power of two may move from one operand of a multiplication to
the other, barring overflow; nothing else is reassociated. An operator stays if its replacement has another memory
layout, because a view of it may depend on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir import ir
from passes.ir.stages import Stage
from passes.trace.editor import Editor

aten = torch.ops.aten

# operator -> the number with which it returns its operand
NEUTRAL: dict[Any, float] = {
    aten.div.Scalar: 1.0,
    aten.div.Tensor: 1.0,
    aten.mul.Scalar: 1.0,
    aten.mul.Tensor: 1.0,
    aten.pow.Tensor_Scalar: 1.0,
}
CASTS = (aten._to_copy.default, aten.to.dtype)
INVOLUTIONS = (aten.neg.default, aten.t.default, aten.transpose.int)


def same_operand(node: fx.Node) -> Any:
    """Return the operand that a node returns unchanged, or None."""
    x, *others = node.args
    if node.target in NEUTRAL and not isinstance(others[0], fx.Node) and others[0] == NEUTRAL[node.target]:
        return x
    if node.target in CASTS and ir.is_tensor(x) and set(node.kwargs) <= {"dtype"} and len(others) <= 1:
        return x
    return None


def undo(node: fx.Node) -> Any:
    """Return the operand of two operators of which the second undoes the first, or None."""
    x, *others = node.args
    if node.target not in INVOLUTIONS or not isinstance(x, fx.Node) or x.target is not node.target:
        return None
    rank = ir.example(node).dim()
    dims = [sorted(dim % rank for dim in dim_args) for dim_args in (others, x.args[1:])]
    return x.args[0] if dims[0] == dims[1] else None


def lies_alike(a: fx.Node, b: fx.Node) -> bool:
    """Return True if two nodes compute tensors of one shape, dtype and layout."""
    x, y = ir.example(a), ir.example(b)
    return (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)


def drop(node: fx.Node, ctx: ir.Context) -> bool:
    """Let a node's users read the operand that it returns unchanged; return True if it does."""
    if not node.args or not ir.is_tensor(node):
        return False
    operand = same_operand(node)
    operand = undo(node) if operand is None else operand
    if not ir.is_tensor(operand) or not lies_alike(node, operand):
        return False
    if ir.spec(operand) is None:
        ir.update(operand, spec=ir.spec(node), stands_for=ir.stands_for(node))
    node.replace_all_uses_with(operand)
    return True


def join_scales(node: fx.Node, ctx: ir.Context) -> bool:
    """Scale once in `mul(div(y, d), mul(x, c))`, c a power of two; return True if the node matches."""
    if node.target is not aten.mul.Tensor:
        return False
    for quotient, multiple in (node.args, node.args[::-1]):
        if (
            is_alone(quotient, aten.div.Scalar)
            and is_alone(multiple, aten.mul.Scalar)
            and is_power_of_two(multiple.args[1])
        ):
            quotient.update_arg(1, quotient.args[1] / multiple.args[1])
            multiple.replace_all_uses_with(multiple.args[0])
            return True
    return False


def is_alone(node: Any, target: Any) -> bool:
    """Return True if a node is a call of the operator with one user."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def is_power_of_two(number: float) -> bool:
    """Return True if multiplying by the number is exact."""
    return math.frexp(abs(number))[0] == 0.5


def scale_before_expanding(node: fx.Node, ctx: ir.Context) -> bool:
    """Rewrite `div(expand(y), d)` as `expand(div(y, d))`, with fewer divisions; return True if the node matches."""
    if node.target is not aten.div.Scalar or not is_alone(node.args[0], aten.expand.default):
        return False
    (expanded, number), (small, shape) = node.args, node.args[0].args
    edit = Editor.before(node, ctx)
    scaled = edit.call(node.target, (small, number))
    node.replace_all_uses_with(edit.moved_to(node, expanded).call(expanded.target, (scaled, shape)))
    return True


REWRITES: tuple[Callable[[fx.Node, ir.Context], bool], ...] = (drop, join_scales, scale_before_expanding)


@dataclass(frozen=True)
class Simplify(ir.Pass):
    """Apply the rewrites, each once over the graph in order."""

    name = "simplify"
    takes = (Stage.JOINT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        counts: dict[str, int] = {}
        for rewrite in REWRITES:
            counts[rewrite.__name__] = sum(rewrite(node, ctx) for node in list(program.calls()))
        program.graph.eliminate_dead_code()
        program.module.recompile()
        return program, ir.Report(counts)
