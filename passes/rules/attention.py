"""Attention: batch and heads are free; a sequence that attends to itself may be sharded on `cp`."""

from __future__ import annotations

from torch import fx

from passes.program import ir
from passes.program.mesh import SEQUENCE_AXIS
from passes.program.operators import argument
from passes.rules.base import Names, Rule, RuleMaker, bind_sizes, emit_of, result_shapes, tensor_operands

CONTEXT = frozenset({SEQUENCE_AXIS})
INTERVAL = "ct::interval_attention"
NAME = "scaled_dot_product_attention"  # its local form is of `passes/context`


def scaled_dot_product_attention(node: fx.Node) -> Rule:
    """q[..., (g r), s, e], k[..., g, s, e], v[..., g, s, f], mask -> [..., (g r), s, f]; r > 1 under GQA.

    Where keys are not as many as queries, they are whole, and queries free unless a causal mask numbers them.
    """
    q, k, v, *masks = tensor_operands(node)
    shapes = [tuple(ir.example(n).shape) for n in (q, k, v)]
    rank = len(shapes[0])
    lead = tuple((f"b{i}",) if n != 1 else () for i, n in enumerate(shapes[0][: rank - 3]))
    heads: Names = ("g", "r") if rank >= 4 and shapes[0][-3] != shapes[1][-3] else ("g",)
    itself = rank == 4 and shapes[0][-2] == shapes[1][-2]
    query, key = ("s", "s") if itself else ("q", "k")
    q_dims = (*lead, *([heads] if rank >= 3 else []), (query,), ("e",))
    k_dims = (*lead, *([("g",)] if rank >= 3 else []), (key,), ("e",))
    v_dims = (*k_dims[:-1], ("f",))
    out_dims = (*q_dims[:-1], ("f",))
    sizes = bind_sizes([q_dims, k_dims, v_dims], [[n for n in s] for s in shapes]) | {"k": shapes[1][-2]}
    masks_dims = [_mask_dims(tuple(ir.example(m).shape), (*q_dims[:-1], ("k",)), sizes) for m in masks]
    assert result_shapes(node)[0][-1] == sizes["f"]
    drops, is_causal = argument(node, "dropout_p"), argument(node, "is_causal")
    numbered = {query} if drops or (is_causal and not itself) else set()
    return Rule(
        (q_dims, k_dims, v_dims, *masks_dims),
        (out_dims,),
        sizes,
        whole=frozenset({"k", "e", "f"} | numbered),
        only={query: CONTEXT},
        emit=emit_of(NAME),
    )


def interval_attention(node: fx.Node) -> Rule:
    """q[b, (g r), s, e], k[b, g, s, e], v[b, g, s, f], first[b, s], last[b, s] -> [b, (g r), s, f].

    Terms of a score function have the dims of scores, each of them or one, but for keys.
    """
    q, k, v, first, last, *terms = tensor_operands(node)
    shapes = [tuple(ir.example(n).shape) for n in (q, k, v)]
    (b, h, s, _), (_, g, t, _), _ = shapes
    lead: Names = ("b",) if b != 1 else ()
    heads: Names = ("g", "r") if h != g else ("g",)
    query, key = ("s", "s") if s == t else ("q", "k")
    dims = [(lead, heads, (query,), ("e",)), (lead, ("g",), (key,), ("e",)), (lead, ("g",), (key,), ("f",))]
    sizes = bind_sizes(dims, [list(shape) for shape in shapes])
    bounds = [_mask_dims(tuple(ir.example(x).shape), (lead, (query,)), sizes) for x in (first, last)]
    others = [_mask_dims(tuple(ir.example(x).shape), (*dims[0][:3], ()), sizes) for x in terms]
    out = (*dims[0][:3], ("f",))
    return Rule(
        (*dims, *bounds, *others),
        (out,),
        sizes,
        whole=frozenset({"k", "e", "f"}),
        only={query: CONTEXT},
        safe={3: 0.0, 4: 0.0},
        emit=emit_of(INTERVAL),
    )


def _mask_dims(shape: tuple[int, ...], full: tuple[Names, ...], sizes) -> tuple[Names, ...]:
    return tuple(() if n == 1 else names for n, names in zip(shape, full[len(full) - len(shape) :], strict=True))


def rules() -> dict[str, RuleMaker]:
    """Operator name -> rule, for attention."""
    return {NAME: scaled_dot_product_attention, INTERVAL: interval_attention}
