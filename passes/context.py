"""Context parallelism: attention of a sequence that `cp` shards, by a method chosen for each call.

    ring         keys and values travel around the ranks (`passes/ring.py`): O(S/P) of them a rank
    all_gather   keys and values are gathered, one kernel call: any mask, also one with a gradient
    ulysses      heads are exchanged for sequence, each rank attends with its heads over all of it (arXiv 2309.14509)

What a rank sends for one call, forward and backward, with Q, O and KV the bytes of its own queries, results, keys and
values, and KV' those in fp32 or wider:

    ring         2 (P-1) KV + P KV'
    all_gather   2 (P-1) KV
    ulysses      2 (P-1)/P (Q + KV R + O)       R: copies of the keys' heads, where there are fewer than ranks

`auto` takes what sends least. An all-gather keeps P KV for the backward and computes what a causal mask hides, so its
bytes count double.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes import boundary, ir, ring
from passes.kernels import wide
from passes.layout import entries, to_natural_order, to_rank_order
from passes.mesh import SEQUENCE_AXIS as AXIS
from passes.spec import Spec

aten = torch.ops.aten
Method = Literal["auto", "ring", "all_gather", "ulysses"]
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Call:
    """One attention as a rank sees it: local shapes, its dtype, and what mask it has."""

    query: tuple[int, ...]  # b, h, s, e
    key: tuple[int, ...]  # b, g, s, e
    value: tuple[int, ...]  # b, g, s, f
    dtype: torch.dtype
    parts: int
    causal: bool = False
    folded: bool = False
    mask: Literal["none", "bool", "numbers"] = "none"
    mask_by_head: bool = False

    def sent_bytes(self, method: str) -> int:
        """Bytes that a rank sends, forward and backward."""
        (b, h, s, e), (_, g, _, _), (*_, f) = self.query, self.key, self.value
        keys, heads, parts = b * g * s * (e + f), b * h * s * (e + f), self.parts
        size = self.dtype.itemsize
        if method == "ring":
            return (2 * (parts - 1) * size + parts * wide(self.dtype).itemsize) * keys
        if method == "all_gather":
            return 2 * (parts - 1) * size * keys
        return 2 * (parts - 1) * size * (heads + keys * self.copies) // parts

    def kept_bytes(self, method: str) -> int:
        """Bytes of keys and values that a rank holds at once in the forward."""
        b, g, s, e = self.key
        keys = b * g * s * (e + self.value[-1]) * self.dtype.itemsize
        return keys * {"ring": 2, "all_gather": self.parts, "ulysses": self.copies}[method]

    @property
    def copies(self) -> int:
        """Of each head of keys, so that every rank gets one."""
        return max(1, self.parts // self.key[1])

    def obstacle(self, method: str) -> str:
        """Why a method cannot do it, or an empty string."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        if method == "ring" and self.mask == "numbers":
            return "a mask of numbers may have a gradient"
        if method == "ring" and self.causal and not self.folded:
            return "the sequence is not folded"
        if method == "ulysses" and (h % self.parts or (g % self.parts and self.parts % g)):
            return f"{h} heads, {g} of keys, do not go evenly over {self.parts} ranks"
        if method == "ulysses" and self.mask_by_head:
            return "the mask differs by head"
        return ""

    def choose(self, asked: str) -> tuple[str, str]:
        """The method, and the reason."""
        if asked != "auto":
            why = self.obstacle(asked)
            return ("all_gather", f"{asked} cannot: {why}") if why else (asked, "asked for")
        costs = {m: self.sent_bytes(m) for m in ("ring", "all_gather", "ulysses") if not self.obstacle(m)}
        costs["all_gather"] *= 2
        best = min(costs, key=costs.__getitem__)
        listed = ", ".join(f"{m} {cost:,}" for m, cost in costs.items())
        return best, f"the cheapest, in bytes: {listed}"


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
    by_head = bool(masks) and ir.example(masks[0]).dim() > 2 and ir.example(masks[0]).shape[-3] > 1
    kind = "none" if not masks else "numbers" if ir.example(masks[0]).is_floating_point() else "bool"
    shapes = (tuple(ir.example(x).shape) for x in (q, k, v))
    call = Call(  # type: ignore[call-arg,misc]
        *shapes, ir.example(q).dtype, builder.mesh[AXIS], causal, AXIS in builder.mesh.folded, kind, by_head
    )
    method, why = call.choose(builder.context_method)
    builder.notes.append(
        f"%{node.name} ({ir.source(node)}): {method} over {AXIS}, {why}; {call.sent_bytes(method):,} bytes sent, "
        f"{call.kept_bytes(method):,} of keys and values held at once"
    )
    if method == "ring":
        return ring_attention(builder, operands, specs, causal, given.get("scale"))
    if method == "ulysses":
        return ulysses_attention(builder, operands, specs, causal, options, call)
    return gathered_attention(builder, operands, specs, causal, options)


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
    return builder.convert(x, spec, replace(spec, dims=dims, varying=(*spec.varying, AXIS)), True, None)


def ulysses_attention(
    builder: Any, operands: list[fx.Node], specs: list[Spec], causal: bool, options: dict, call: Call
) -> fx.Node:
    """Heads exchanged for sequence before, and sequence for heads after."""
    q, k, v, *masks = operands
    size, held, parts, folded = specs[0].dims[-2][0].size, call.query[2], call.parts, call.folded

    def exchange(x: fx.Node) -> fx.Node:
        args = (x, 1, 2, parts * held, AXIS, parts)
        x = builder.call(boundary.all_to_all, args)
        return builder.trace(lambda x: natural(x), x)

    def natural(x: Tensor) -> Tensor:
        return to_natural_order(x, 2, parts, size) if folded else x.narrow(2, 0, size)

    if call.copies > 1:
        k, v = (builder.trace(lambda x: x.repeat_interleave(call.copies, 1), x) for x in (k, v))
    mask = gather(builder, masks[0], specs[3]) if masks and AXIS in specs[3].sharded else masks[0] if masks else None
    values = (*map(exchange, (q, k, v)), mask, 0.0, causal)
    out = builder.call(aten.scaled_dot_product_attention.default, values, options)
    if folded:
        out = builder.trace(lambda x: to_rank_order(x, 2, parts), out)
    return builder.call(boundary.all_to_all, (out, 2, 1, call.query[1], AXIS, parts))
