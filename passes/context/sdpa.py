"""The record of PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.context import attention
from passes.context.attention import AttentionKernel, AttentionOp, Nodes, Specs, attention_rule, repeat_heads
from passes.context.call import AttentionCall, Pairs
from passes.context.context import gather, ring_attention
from passes.context.kernels import pad_to_width, scale_of
from passes.ir import ir
from passes.ir.layout import entries, to_rank_order
from passes.ir.slices import constant
from passes.ir.spec import Factor
from passes.rules.base import Rule, tensor_operands
from passes.trace.builder import Builder

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return a call's arguments by name, without defaults."""
    return dict(zip(NAMES, node.args)) | node.kwargs


def is_causal(node: fx.Node) -> bool:
    """Return True if the call hides keys after a query's own."""
    return bool(arguments(node).get("is_causal", False))


# ---- the rule and rewrites --------------------------------------------------------------------------


def scaled_dot_product_attention(node: fx.Node) -> Rule:
    """Return the rule of a call in four dims, whose dropout, if any, has been written out.

    If there are not as many keys as queries, queries too stay unsharded under a causal mask, which numbers them.
    """
    q, k, _, *masks = tensor_operands(node)
    are_numbered = is_causal(node) and ir.example(q).shape[-2] != ir.example(k).shape[-2]
    whole = frozenset({"k", "e", "f"} | ({"q"} if are_numbered else set()))
    return attention_rule(node, *["bhst"] * len(masks), whole=whole)


def attention_in_four_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *others, **options) -> Tensor:
    """Compute attention with q as [n, h, s, e]: leading dims are broadcast and flattened, missing ones get size 1."""
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))

    def to_four_dims(x: Tensor) -> Tensor:
        return x.expand(*lead, *x.shape[-3:]).flatten(0, -4) if lead else x.view(*[1] * (4 - x.dim()), *x.shape)

    mask = mask if mask is None or mask.dim() < 4 else to_four_dims(mask)
    out = F.scaled_dot_product_attention(to_four_dims(q), to_four_dims(k), to_four_dims(v), mask, *others, **options)
    return out.view(*lead, *q.shape[-3:-1], v.shape[-1])


def in_four_dims(node: fx.Node) -> bool:
    """Return True if q, k and v have four dims, of which the first are equal."""
    shapes = [ir.example(x).shape for x in tensor_operands(node)[:3]]
    return all(len(shape) == 4 for shape in shapes) and len({shape[0] for shape in shapes}) == 1


def attention_with_dropout(
    drop: Callable[[Tensor, float], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention from its parts, q[..., t, d] over k[..., s, d], with dropout of its weights.

    A row that sees nothing is zero.
    """
    if enable_gqa:
        k, v = (repeat_heads(x, q.shape[-3] // k.shape[-3]) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        row, column = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        mask = row[:, None] >= column
    if mask is None:
        return drop(scores.softmax(-1), dropout_p) @ v
    if mask.is_floating_point():
        scores = scores + mask
        sees_any = (scores > -torch.inf).any(-1, keepdim=True)
        weights = torch.where(sees_any, torch.where(sees_any, scores, 0.0).softmax(-1), 0.0)
        return drop(weights, dropout_p) @ v
    weights = torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(-1)
    return drop(torch.where(mask, weights, 0.0), dropout_p) @ v


# ---- local forms ------------------------------------------------------------------------------------


def local(builder: Builder, node: fx.Node, operands: Nodes, runs: fx.Node | None) -> fx.Node:
    """Insert PyTorch's attention over all keys of the rank's queries."""
    q, k, v, *masks = operands
    args = arguments(node)
    values = q, k, v, masks[0] if masks else None, args.get("dropout_p", 0.0), is_causal(node)
    return sdpa(builder, values, options_of(node))


def options_of(node: fx.Node) -> dict[str, Any]:
    """Return a call's scale and grouping of heads, if given."""
    return {name: value for name, value in arguments(node).items() if name in ("scale", "enable_gqa")}


def sdpa(builder: Builder, values: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
    """Insert PyTorch's attention; on the CPU, pad queries, keys and values to one width, which its flash kernel needs.

    With different widths (latent attention: keys of 192, values of 128), PyTorch would hold the scores of all pairs in
    memory.
    """
    q, k, v, *others = values
    width, query = ir.example(v).shape[-1], ir.example(q)
    if width == query.shape[-1] or query.device.type != "cpu":
        return builder.call(aten.scaled_dot_product_attention.default, values, options)
    widest = max(width, query.shape[-1])
    padded_operands = [builder.trace(lambda x: pad_to_width(x, widest), x) for x in (q, k, v)]
    with_scale = options | {"scale": scale_of(query, options.get("scale"))}
    result = builder.call(aten.scaled_dot_product_attention.default, (*padded_operands, *others), with_scale)
    return result if width == widest else builder.trace(lambda x: x.narrow(-1, 0, width).contiguous(), result)


def gather_form(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, runs: fx.Node | None) -> fx.Node:
    """Gather keys and values, whose gradients are scattered, and expand a causal mask for the rank's queries."""
    q, k, v, *masks = operands
    factor = specs[0].dims[-2][0]
    full = [gather(builder, x, spec) for x, spec in zip((k, v), specs[1:3])]
    mask = masks[0] if masks else None
    if is_causal(node):
        device, at = ir.example(q).device, builder.at(factor)

        def sees(*places: Tensor) -> Tensor:
            index, _ = entries(factor, builder.mesh, dict(zip(at, places)), device)
            return index[:, None] >= torch.arange(factor.size, device=device)

        mask = builder.trace(sees, *at.values())
    return sdpa(builder, (q, *full, mask, 0.0, False), options_of(node))


def ring_form(
    builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, call: AttentionCall, method: str
) -> fx.Node:
    """Insert a ring."""
    return ring_attention(builder, operands, specs, arguments(node).get("scale"), call, method)


def call_of(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs) -> AttentionCall:
    """Return the call as its rank sees it, with the pairs that its mask, of the full attention, lets through."""
    call, masks, order = attention.call_of(builder, node, operands, specs), operands[3:], specs[1].order
    mask = arguments(node).get("attn_mask")
    by_head = bool(masks) and ir.example(masks[0]).dim() > 2 and ir.example(masks[0]).shape[-3] > 1
    kind = "none" if mask is None else "numbers" if ir.example(mask).is_floating_point() else "bool"
    visible = constant(mask) if mask is not None and kind == "bool" and not order.table else None
    rows, columns = specs[0].dims[-2][0], specs[1].dims[-2][0]
    pairs = None if visible is None else pairs_that_see(visible, rows, columns, order.zigzag, call.parts)
    return replace(call, causal=is_causal(node), mask=kind, mask_by_head=by_head, pairs=pairs)


def pairs_that_see(mask: Tensor, rows: Factor, columns: Factor, zigzag: bool, parts: int) -> Pairs:
    """Return the (query rank, key rank) pairs in which any query sees a key."""
    sees = mask.reshape(-1, *mask.shape[-2:]).any(0).expand(rows.size, columns.size)
    for dim in (0, 1):
        missing = -sees.shape[dim] % (2 * parts if zigzag else parts)
        sees = torch.cat([sees, sees.new_zeros([missing if d == dim else n for d, n in enumerate(sees.shape)])], dim)
        sees = to_rank_order(sees, dim, parts) if zigzag else sees
    pairs = sees.unflatten(1, (parts, -1)).any(2).unflatten(0, (parts, -1)).any(1)
    return frozenset((i, j) for i, j in pairs.nonzero().tolist())


# ---- the record -------------------------------------------------------------------------------------


def flash(name: str) -> AttentionKernel:
    """Return the kernel record of one of PyTorch's own kernels, by name."""
    return AttentionKernel(getattr(aten, name).default, getattr(aten, f"{name}_backward").default)


RECORD = AttentionOp(
    SDPA,
    scaled_dot_product_attention,
    local,
    kernels=(
        AttentionKernel(SDPA),
        flash("_scaled_dot_product_flash_attention_for_cpu"),
        flash("_scaled_dot_product_flash_attention"),
        flash("_scaled_dot_product_efficient_attention"),
        flash("_scaled_dot_product_cudnn_attention"),
        flash("_scaled_dot_product_fused_attention_overrideable"),
    ),
    written=lambda node: None if in_four_dims(node) else attention_in_four_dims,
    dropping=attention_with_dropout,
    causal=is_causal,
    call=call_of,
    gathered=gather_form,
    ring=ring_form,
)
