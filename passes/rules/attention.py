"""Attention: heads and batch are free, query and key positions must be whole."""

from __future__ import annotations

from torch import fx

from passes import ir
from passes.rules.base import Names, Rule, RuleMaker, bind_sizes, result_shapes, tensor_operands


def scaled_dot_product_attention(node: fx.Node) -> Rule:
    """q[..., (g r), q, e], k[..., g, k, e], v[..., g, k, f], mask -> [..., (g r), q, f]; r > 1 under GQA."""
    q, k, v, *masks = tensor_operands(node)
    shapes = [tuple(ir.example(n).shape) for n in (q, k, v)]
    rank = len(shapes[0])
    lead = tuple((f"b{i}",) if n != 1 else () for i, n in enumerate(shapes[0][: rank - 3]))
    heads: Names = ("g", "r") if rank >= 4 and shapes[0][-3] != shapes[1][-3] else ("g",)
    q_dims = (*lead, *([heads] if rank >= 3 else []), ("q",), ("e",))
    k_dims = (*lead, *([("g",)] if rank >= 3 else []), ("k",), ("e",))
    v_dims = (*k_dims[:-1], ("f",))
    out_dims = (*q_dims[:-1], ("f",))
    sizes = bind_sizes([q_dims, k_dims, v_dims], [[n for n in s] for s in shapes])
    masks_dims = [_mask_dims(tuple(ir.example(m).shape), (*q_dims[:-1], ("k",)), sizes) for m in masks]
    assert result_shapes(node)[0][-1] == sizes["f"]
    return Rule((q_dims, k_dims, v_dims, *masks_dims), (out_dims,), sizes, whole=frozenset("qkef"))


def _mask_dims(shape: tuple[int, ...], full: tuple[Names, ...], sizes) -> tuple[Names, ...]:
    return tuple(() if n == 1 else names for n, names in zip(shape, full[len(full) - len(shape) :], strict=True))


def rules() -> dict[str, RuleMaker]:
    """Operator name -> rule, for attention."""
    return {"scaled_dot_product_attention": scaled_dot_product_attention}
