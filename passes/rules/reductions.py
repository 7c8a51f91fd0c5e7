"""Reductions, and norms, whose reduced dims cannot be sharded."""

from __future__ import annotations

from torch import fx

from passes.ir import ir
from passes.ir.operators import argument, name_of
from passes.rules import pointwise
from passes.rules.base import Names, Rule, RuleMaker, needs_gradient, numbered, of_dims, result_shapes, tensor_operands

REDUCTIONS = {"sum": ("sum", 0.0), "amax": ("max", float("-inf")), "any": ("max", 0.0), "count_nonzero": ("sum", 0.0)}


def _reduced_dims(node: fx.Node, rank: int) -> set[int]:
    dims = argument(node, "dim")
    if dims is None or dims == []:
        return set(range(rank))
    return {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])} if rank else set()


def _dims(node: fx.Node) -> tuple[tuple[Names, ...], tuple[Names, ...], set[int]]:
    (x,) = tensor_operands(node)
    shape = tuple(ir.example(x).shape)
    reduced_dims, keeps_dims = _reduced_dims(node, len(shape)), len(result_shapes(node)[0]) == len(shape)
    names = numbered(shape)
    result = tuple(() if i in reduced_dims else n for i, n in enumerate(names) if i not in reduced_dims or keeps_dims)
    return names, result, reduced_dims


def reduction(node: fx.Node) -> Rule:
    """Make the rule of sum, amax, any: if a reduced dim is sharded, the result is partial."""
    names, result, reduced_dims = _dims(node)
    if name_of(node) == "amax" and needs_gradient(tensor_operands(node)[0]):
        return full_reduction(node)  # tied maxima on several ranks would have to share the gradient
    kind, padding = REDUCTIONS[name_of(node)]
    reduced = {n: kind for i in reduced_dims for n in names[i]}
    linear = frozenset([frozenset([0])]) if name_of(node) == "sum" else frozenset()
    return of_dims(node, [names], [result], reduced=reduced, linear=linear, pad_in=padding)


def full_reduction(node: fx.Node) -> Rule:
    """Make the rule of mean, var, argmax, norms of a dim: the reduced dims cannot be sharded."""
    names, result, reduced_dims = _dims(node)
    results = [result for _ in result_shapes(node)]
    safe = {0: 0.0} if name_of(node) == "logsumexp" else {}  # rows of -inf would give gradients of NaN
    return of_dims(node, [names], results, whole=frozenset(n for i in reduced_dims for n in names[i]), pad_safe=safe)


def extremum(node: fx.Node) -> Rule:
    """Make the rule of max and min: a reduction of one tensor, or elementwise of two."""
    return pointwise.rule(node) if len(tensor_operands(node)) > 1 else full_reduction(node)


def normalize(node: fx.Node) -> Rule:
    """Make the rule of rms_norm and layer_norm: the normalized trailing dims cannot be sharded."""
    x, *weights = tensor_operands(node)
    names, tail = numbered(ir.example(x).shape), len(node.args[1])  # type: ignore[arg-type]
    last = names[len(names) - tail :]
    return of_dims(
        node,
        [names, *(last for _ in weights)],
        [names],
        whole=frozenset(n for dim in last for n in dim),
        pad_out=lambda fills: 0.0 if name_of(node) == "rms_norm" and fills[0] == 0 else None,
    )


FULL = "amin kthvalue mean median var std argmax argmin prod logsumexp linalg_vector_norm all var_mean"
RULES: dict[str, RuleMaker] = {
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(FULL.split(), full_reduction),
    **dict.fromkeys(("max", "min"), extremum),
    **dict.fromkeys(("rms_norm", "layer_norm"), normalize),
}
