"""Context parallelism: attention of a sequence that `cp` shards, by a method chosen for each call.

ring         keys and values travel around the ranks (`passes/ring.py`): O(S/P) of them a rank
all_gather   keys and values are gathered, one kernel call: any mask, also one with a gradient
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes import ir, ring
from passes.convert import convert
from passes.layout import entries
from passes.mesh import SEQUENCE_AXIS as AXIS
from passes.spec import Spec

aten = torch.ops.aten
Method = Literal["auto", "ring", "all_gather"]
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def emit_attention(
    builder: Any, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Attention on the rank's queries; where keys are sharded as they are, by the method asked for."""
    given = dict(zip(NAMES, node.args)) | node.kwargs
    options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    causal = bool(given.get("is_causal", False))
    q, k, v, *masks = operands
    if AXIS not in specs[1].sharded or specs[1].dims[-2][0].axes != (AXIS,):
        values = (q, k, v, masks[0] if masks else None, given.get("dropout_p", 0.0), causal)
        return builder.call(aten.scaled_dot_product_attention.default, values, options)
    method, why = choose(builder, causal, masks)
    builder.notes.append(f"%{node.name} ({ir.source(node)}): {method} over {AXIS}, {why}")
    if method == "ring":
        return ring_attention(builder, operands, specs, causal, given.get("scale"))
    return gathered_attention(builder, operands, specs, causal, options)


def choose(builder: Any, causal: bool, masks: list[fx.Node]) -> tuple[str, str]:
    """The method for one call and the reason."""
    has_bias = bool(masks) and ir.example(masks[0]).is_floating_point()
    folded = AXIS in builder.mesh.folded
    if has_bias:
        return "all_gather", "a mask of numbers may have a gradient"
    if causal and not folded:
        return "all_gather", "the sequence is not folded"
    if builder.context_method != "auto":
        return builder.context_method, "asked for"
    return "ring", "keys and values of one rank at a time"


def ring_attention(
    builder: Any, operands: list[fx.Node], specs: list[Spec], causal: bool, scale: float | None
) -> fx.Node:
    """One local operator, in line before the program is lowered."""
    factor, folded = specs[1].dims[-2][0], AXIS in builder.mesh.folded
    how = ring.Ring(AXIS, builder.mesh[AXIS], factor.size, causal, folded, scale)
    key = (how, len(operands) > 3)
    if key not in builder.operators:
        builder.operators[key] = ring.operator(*key)
    both = builder.call(builder.operators[key], (*operands, builder.places[AXIS]))
    return builder.call(operator.getitem, (both, 0))


def gathered_attention(
    builder: Any, operands: list[fx.Node], specs: list[Spec], causal: bool, options: dict
) -> fx.Node:
    """Keys and values gathered, their gradients scattered; a causal mask spelled out for the rank's queries."""
    q, k, v, *masks = operands
    factor = specs[0].dims[-2][0]
    whole = [gather(builder, x, spec) for x, spec in zip((k, v), specs[1:3])]
    mask = masks[0] if masks else None
    if causal:
        device = ir.example(q).device

        def sees(*at: Tensor) -> Tensor:
            index, _ = entries(factor, builder.mesh, dict(zip(factor.axes, at)), device)
            return index[:, None] >= torch.arange(factor.size, device=device)

        mask = builder.trace(sees, *builder.at(factor))
    return builder.call(aten.scaled_dot_product_attention.default, (q, *whole, mask, 0.0, False), options)


def gather(builder: Any, x: fx.Node, spec: Spec) -> fx.Node:
    """A sequence gathered from the ranks that share it, a copy whose gradients are summed."""
    dims = (*spec.dims[:-2], (replace(spec.dims[-2][0], axes=()), *spec.dims[-2][1:]), spec.dims[-1])
    return convert(builder, x, spec, replace(spec, dims=dims, varying=(*spec.varying, AXIS)), True, None)
