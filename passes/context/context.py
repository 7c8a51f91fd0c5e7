"""Context parallelism: attention of a sequence that `cp` shards, by a method chosen for each call.

    ring         keys and values travel around the ranks (`passes/context/ring.py`): O(S/P) of them a rank
    all_gather   keys and values are gathered, one kernel call: any mask, also one with a gradient
    ulysses      heads are exchanged for sequence, each rank attends with its heads over all of it (arXiv 2309.14509)
    hybrid       ulysses among U neighbours, ring across P/U such groups (arXiv 2405.07719)

What a rank sends for one call, forward and backward, with Q, O and KV the bytes of its own queries, results, keys and
values, and KV' those in fp32 or wider:

    all_gather   2 (P-1) KV
    the others   2 (U-1)/U (Q + KV R + O)  +  (2 (N-1) KV + N KV') R      ring: U = 1, ulysses: U = P
                 R: copies of the keys' heads, where there are fewer than U ranks
                 N: steps of P/U at which any rank sees anything; one step sends nothing

`auto` takes what is cheapest, in bytes: a ring's travel beside the computation, so only what that does not hide
counts, and never less than the last way home; an all-gather computes what a causal mask hides, which counts as the
bytes that could have been sent meanwhile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes.context import ring
from passes.context.balance import ranks_that_meet
from passes.context.kernels import padded, scale_of, wide
from passes.cost.cluster import FLOPS_PER_BYTE
from passes.program import boundary, ir
from passes.program.attend import attend
from passes.program.builder import Builder
from passes.program.constants import constant
from passes.program.layout import entries, run_starts, to_natural_order, to_rank_order
from passes.program.mesh import BLOCKS, HOPS
from passes.program.mesh import SEQUENCE_AXIS as AXIS
from passes.program.spec import Factor, Spec
from passes.rules import attention
from passes.rules.base import EMITTERS

aten = torch.ops.aten
Method = Literal["auto", "ring", "all_gather", "ulysses", "hybrid"]
METHODS = ("ring", "all_gather", "ulysses", "hybrid")
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Call:
    """One attention as a rank sees it: local shapes, its dtype, and what mask it has.

    `pairs` are the (rank of queries, rank of keys) that see anything, None if that is not known or all do. Keys `dealt`
    in blocks are not where a causal ring, or the mask of one, has them; attention by interval takes them anywhere.
    """

    query: tuple[int, ...]  # b, h, s, e
    key: tuple[int, ...]  # b, g, s, e
    value: tuple[int, ...]  # b, g, s, f
    dtype: torch.dtype
    parts: int
    causal: bool = False
    folded: bool = False
    mask: Literal["none", "bool", "numbers"] = "none"
    mask_by_head: bool = False
    pairs: Pairs | None = None
    dealt: bool = False

    # -- ranks that exchange heads (U), and steps of the ring across ------------------------------

    def exchanging(self, method: str) -> int:
        """U: how many neighbours exchange heads for sequence."""
        return {"ring": 1, "ulysses": self.parts}.get(method) or min(self.divisors(), key=self.cost_across)

    def divisors(self) -> list[int]:
        """What a hybrid may take for U: heads go evenly over it."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        fits = (u for u in range(2, self.parts) if self.parts % u == 0)
        return [u for u in fits if h % u == 0 and (g % u == 0 or u % g == 0)]

    def steps(self, inner: int) -> tuple[int, ...]:
        """The steps of a ring across groups of `inner` at which any rank sees anything, the first included."""
        parts = self.parts // inner
        if self.pairs is None:
            return tuple(range(parts))
        apart = {(i // inner - j // inner) % parts for i, j in self.pairs}
        return tuple(sorted({0, *apart}))

    def copies(self, inner: int) -> int:
        """R: of each head of keys, so that each of `inner` ranks gets one."""
        return max(1, inner // self.key[1])

    # -- bytes ------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        """Entries of keys and values."""
        (b, g, s, e), (*_, f) = self.key, self.value
        return b * g * s * (e + f)

    def exchanged_bytes(self, inner: int) -> int:
        """Sent for heads, forward and backward."""
        (b, h, s, e), (*_, f) = self.query, self.value
        return 2 * (inner - 1) * self.dtype.itemsize * (b * h * s * (e + f) + self.keys * self.copies(inner)) // inner

    def travelling_bytes(self, inner: int) -> int:
        """Sent around the ring across, forward and backward."""
        n = len(self.steps(inner))
        each = 2 * (n - 1) * self.dtype.itemsize + n * wide(self.dtype).itemsize
        return self.keys * self.copies(inner) * each if n > 1 else 0

    def sent_bytes(self, method: str) -> int:
        """Bytes that a rank sends, forward and backward."""
        if method == "all_gather":
            return 2 * (self.parts - 1) * self.dtype.itemsize * self.keys
        inner = self.exchanging(method)
        return self.exchanged_bytes(inner) + self.travelling_bytes(inner)

    def kept_bytes(self, method: str) -> int:
        """Bytes of keys and values that a rank holds at once in the forward."""
        own = self.keys * self.dtype.itemsize
        if method == "all_gather":
            return own * self.parts
        inner = self.exchanging(method)
        return own * self.copies(inner) * min(2, len(self.steps(inner)))

    # -- the choice -------------------------------------------------------------------------------

    @property
    def hidden_bytes(self) -> int:
        """What could be sent while attention is computed; its backward is 2.5 times the forward (arXiv 2307.08691)."""
        (b, h, s, e), (*_, f) = self.query, self.value
        flops = 3.5 * 2 * b * h * s * s * self.parts * (e + f)
        return int(flops * (0.5 if self.causal else 1.0) / FLOPS_PER_BYTE)

    def cost_across(self, inner: int) -> int:
        """Bytes that nothing hides, of heads exchanged and a ring across."""
        travelling = self.travelling_bytes(inner)
        home = self.keys * self.copies(inner) * wide(self.dtype).itemsize
        return self.exchanged_bytes(inner) + min(travelling, max(home, travelling - self.hidden_bytes))

    def cost(self, method: str) -> int:
        """What `auto` compares, in bytes."""
        if method == "all_gather":
            return self.sent_bytes(method) + (self.hidden_bytes if self.causal else 0)
        return self.cost_across(self.exchanging(method))

    def obstacle(self, method: str) -> str:
        """Why a method cannot do it, or an empty string."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        if method in ("ring", "hybrid") and self.mask == "numbers":
            return "a mask of numbers may have a gradient"
        if method in ("ring", "hybrid") and self.dealt:
            return "the sequence is dealt in blocks, and this is no attention by interval"
        if method in ("ring", "hybrid") and self.causal and not self.folded:
            return "the sequence is not folded"
        if method == "ulysses" and (h % self.parts or (g % self.parts and self.parts % g)):
            return f"{h} heads, {g} of keys, do not go evenly over {self.parts} ranks"
        if method == "hybrid" and not self.divisors():
            return f"{h} heads, {g} of keys, do not go evenly over any part of {self.parts} ranks"
        if method in ("ulysses", "hybrid") and self.mask_by_head:
            return "the mask differs by head"
        return ""

    def choose(self, asked: str) -> tuple[str, str]:
        """The method, and the reason."""
        if asked != "auto":
            why = self.obstacle(asked)
            return ("all_gather", f"{asked} cannot: {why}") if why else (asked, "asked for")
        costs = {m: self.cost(m) for m in METHODS if not self.obstacle(m)}
        best = min(costs, key=costs.__getitem__)
        listed = ", ".join(f"{m} {cost:,}" for m, cost in costs.items())
        return best, f"the cheapest, in bytes: {listed}"


def emit_attention(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Attention on the rank's queries; where keys are sharded as they are, by the method asked for."""
    given = dict(zip(NAMES, node.args)) | node.kwargs
    options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
    causal = bool(given.get("is_causal", False))
    q, k, v, *masks = operands
    if AXIS not in specs[1].sharded or specs[1].dims[-2][0].axes != (AXIS,):
        return sdpa(builder, (q, k, v, masks[0] if masks else None, given.get("dropout_p", 0.0), causal), options)
    call = describe(builder, operands, specs, causal, given.get("attn_mask"))
    method, why = call.choose(builder.context_method)
    builder.notes.append(note(node, call, method, why))
    if method == "all_gather":
        return gathered_attention(builder, operands, specs, causal, options)

    def alone(q: fx.Node, k: fx.Node, v: fx.Node, *masks: fx.Node) -> fx.Node:
        return sdpa(builder, (q, k, v, masks[0] if masks else None, 0.0, causal), options)

    def around(q: fx.Node, k: fx.Node, v: fx.Node, *masks: fx.Node) -> fx.Node:
        return ring_attention(builder, [q, k, v, *masks], specs, options.get("scale"), call, method)

    inner = call.exchanging(method)
    return exchanged_attention(builder, operands, specs, call, inner, alone if inner == call.parts else around)


def sdpa(builder: Builder, values: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
    """PyTorch's attention; on the CPU, whose flash kernel takes one width, of queries, keys and values as wide alike.

    It would have the scores of all pairs in memory otherwise (latent attention: keys of 192, values of 128).
    """
    q, k, v, *rest = values
    width, given = ir.example(v).shape[-1], ir.example(q)
    if width == given.shape[-1] or given.device.type != "cpu":
        return builder.call(aten.scaled_dot_product_attention.default, values, options)
    widest = max(width, given.shape[-1])
    alike = [builder.trace(lambda x: padded(x, widest), x) for x in (q, k, v)]
    stated = options | {"scale": scale_of(given, options.get("scale"))}
    found = builder.call(aten.scaled_dot_product_attention.default, (*alike, *rest), stated)
    return found if width == widest else builder.trace(lambda x: x.narrow(-1, 0, width).contiguous(), found)


def emit_interval(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Attention by interval: bounds stay with their queries, keys come with the positions that they have."""
    scale, score = node.args[-2:]
    q, k, v, *rows = operands
    runs = None

    def alone(q: fx.Node, k: fx.Node, v: fx.Node, *rows: fx.Node) -> fx.Node:
        found = builder.call(attend, (q, k, v, *rows[:2], runs, list(rows[2:]), scale, score))
        return builder.call(operator.getitem, (found, 0))

    if AXIS not in specs[1].sharded:
        return alone(*operands)
    call = describe_interval(builder, node, operands, specs)
    method, why = call.choose(builder.context_method)
    builder.notes.append(note(node, call, method, why))
    dealt = builder.mesh.deals(AXIS)
    if dealt and method in ("all_gather", "ulysses"):
        runs = builder.trace(torch.flatten, starts_of(builder, specs[1], 1))
    if method == "all_gather":
        together = gather_as_held if dealt else gather
        return alone(q, *(together(builder, x, spec) for x, spec in zip((k, v), specs[1:3])), *rows)

    inner = call.exchanging(method)
    row = builder.row_of_hops(node, inner) if method in ("ring", "hybrid") and call.pairs is None else None

    def around(*values: fx.Node) -> fx.Node:
        given = [*values, starts_of(builder, specs[1], inner), *([] if row is None else [builder.places[HOPS]])]
        return ring_attention(builder, given, specs, scale, call, method, score, row)  # type: ignore[arg-type]

    attention = alone if inner == call.parts else around
    return exchanged_attention(builder, operands, specs, call, inner, attention, dealt)


def starts_of(builder: Builder, spec: Spec, inner: int) -> fx.Node:
    """Where the runs of keys begin that each group of `inner` ranks holds, in its order: i64[P / inner, runs]."""
    mesh, (factor, *_) = builder.mesh, spec.dims[-2]
    parts, chunk = mesh[AXIS] // inner, factor.local(mesh) // mesh.chunks(AXIS)
    if mesh.deals(AXIS):
        return builder.trace(lambda table: (table * chunk).view(parts, -1), builder.places[BLOCKS])
    folded = AXIS in mesh.folded
    return builder.trace(lambda at: run_starts(parts, inner * chunk, folded, at.device), builder.places[AXIS])


def describe_interval(builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec]) -> Call:
    """The call as its rank sees it."""
    query, key, value = (tuple(ir.example(x).shape) for x in operands[:3])
    folded, parts = AXIS in builder.mesh.folded, builder.mesh[AXIS]
    first, last = (constant(x) for x in node.args[3:5])  # type: ignore[arg-type]
    pairs = None
    if first is not None and last is not None and not builder.mesh.deals(AXIS):
        pairs = frozenset((i, j) for i, j in ranks_that_meet(first, last, builder.mesh).nonzero().tolist())
    return Call(query, key, value, ir.example(operands[0]).dtype, parts, False, folded, "none", False, pairs)


def note(node: fx.Node, call: Call, method: str, why: str) -> str:
    """A line for the report."""
    rings = method in ("ring", "hybrid") and call.pairs is not None
    steps = f"; anything is seen in steps {call.steps(call.exchanging(method))}" if rings else ""
    sent, held = call.sent_bytes(method), call.kept_bytes(method)
    which = f"%{node.name} ({ir.source(node)}): {method} over {AXIS}, {why}{steps}"
    return f"{which}; {sent:,} bytes sent, {held:,} of keys and values held at once"


def describe(builder: Builder, operands: list[fx.Node], specs: list[Spec], causal: bool, mask: fx.Node | None) -> Call:
    """The call as its rank sees it; `mask` is that of the whole attention."""
    q, k, v, *masks = operands
    by_head = bool(masks) and ir.example(masks[0]).dim() > 2 and ir.example(masks[0]).shape[-3] > 1
    kind = "none" if mask is None else "numbers" if ir.example(mask).is_floating_point() else "bool"
    folded, parts, dealt = AXIS in builder.mesh.folded, builder.mesh[AXIS], builder.mesh.deals(AXIS)
    seen = constant(mask) if mask is not None and kind == "bool" and not dealt else None
    pairs = None if seen is None else pairs_that_see(seen, specs[0].dims[-2][0], specs[1].dims[-2][0], folded, parts)
    query, key, value = (tuple(ir.example(x).shape) for x in (q, k, v))
    return Call(query, key, value, ir.example(q).dtype, parts, causal, folded, kind, by_head, pairs, dealt)  # type: ignore


def pairs_that_see(mask: Tensor, rows: Factor, columns: Factor, folded: bool, parts: int) -> Pairs:
    """(rank of queries, rank of keys) of which any query sees a key."""
    sees = mask.reshape(-1, *mask.shape[-2:]).any(0).expand(rows.size, columns.size)
    for dim in (0, 1):
        missing = -sees.shape[dim] % (2 * parts if folded else parts)
        sees = torch.cat([sees, sees.new_zeros([missing if d == dim else n for d, n in enumerate(sees.shape)])], dim)
        sees = to_rank_order(sees, dim, parts) if folded else sees
    found = sees.unflatten(1, (parts, -1)).any(2).unflatten(0, (parts, -1)).any(1)
    return frozenset((i, j) for i, j in found.nonzero().tolist())


def gathered_attention(
    builder: Builder, operands: list[fx.Node], specs: list[Spec], causal: bool, options: dict
) -> fx.Node:
    """Keys and values gathered, their gradients scattered; a causal mask spelled out for the rank's queries."""
    q, k, v, *masks = operands
    factor = specs[0].dims[-2][0]
    whole = [gather(builder, x, spec) for x, spec in zip((k, v), specs[1:3])]
    mask = masks[0] if masks else None
    if causal:
        device, at = ir.example(q).device, builder.at(factor)

        def sees(*places: Tensor) -> Tensor:
            index, _ = entries(factor, builder.mesh, dict(zip(at, places)), device)
            return index[:, None] >= torch.arange(factor.size, device=device)

        mask = builder.trace(sees, *at.values())
    return sdpa(builder, (q, *whole, mask, 0.0, False), options)


def gather(builder: Builder, x: fx.Node, spec: Spec) -> fx.Node:
    """A sequence gathered from the ranks that share it, a copy whose gradients are summed."""
    dims = (*spec.dims[:-2], (replace(spec.dims[-2][0], axes=()), *spec.dims[-2][1:]), spec.dims[-1])
    return builder.convert(x, spec, replace(spec, dims=dims, varying=(*spec.varying, AXIS)), True, None)


def gather_as_held(builder: Builder, x: fx.Node, spec: Spec) -> fx.Node:
    """The same, one rank's entries after the other's, padding among them."""
    parts, dim = builder.mesh[AXIS], len(spec.dims) - 2
    held = parts * ir.example(x).shape[dim]
    return builder.call(boundary.all_gather, (x, dim, AXIS, parts, held, ir.example(x).dtype, None))


def exchanged_attention(
    builder: Builder,
    operands: list[fx.Node],
    specs: list[Spec],
    call: Call,
    inner: int,
    attention: Callable[..., fx.Node],
    as_held: bool = False,
) -> fx.Node:
    """Heads exchanged for sequence among `inner` neighbours, attention, and sequence for heads after.

    What comes with queries (`specs` 3 and on) is gathered along the dim that cp shards; of what differs by head a rank
    takes that of its heads. Entries are put into their own order, unless they are taken `as_held`.
    """
    q, k, v, *rows = operands
    parts, axis = call.parts, AXIS if inner == call.parts else f"{AXIS}.inner{inner}"
    if inner == 1:
        return attention(*operands)

    in_order = as_held or builder.mesh.in_order(AXIS)
    table = [builder.places[BLOCKS]] if builder.mesh.deals(AXIS) else []

    def natural(x: fx.Node, spec: Spec, dim: int, held: int) -> fx.Node:
        if as_held:
            return x
        kept = spec.dims[dim][0].size if inner == parts else held
        if in_order:
            return builder.trace(lambda x: x.narrow(dim, 0, kept), x)
        return builder.trace(lambda x, *table: to_natural_order(x, dim, inner, kept, *table), x, *table)

    def exchange(x: fx.Node, spec: Spec) -> fx.Node:
        held = inner * ir.example(x).shape[2]
        return natural(builder.call(boundary.all_to_all, (x, 1, 2, held, axis, inner)), spec, 2, held)

    def own_heads(x: fx.Node) -> fx.Node:
        if ir.example(x).dim() < 4 or ir.example(x).shape[1] == 1:
            return x
        return builder.trace(
            lambda x, at: x.unflatten(1, (inner, -1)).index_select(1, (at % inner).view(1)).squeeze(1),
            x, builder.places[AXIS],
        )  # fmt: skip

    def whole_rows(x: fx.Node, spec: Spec) -> fx.Node:
        x = own_heads(x)
        if AXIS not in spec.sharded:
            return x
        (dim,) = (d for d, factors in enumerate(spec.dims) if any(AXIS in f.axes for f in factors))
        held = inner * ir.example(x).shape[dim]
        return natural(
            builder.call(boundary.all_gather, (x, dim, axis, inner, held, ir.example(x).dtype, None)), spec, dim, held
        )

    if (copies := call.copies(inner)) > 1:
        k, v = (builder.trace(lambda x: x.repeat_interleave(copies, 1), x) for x in (k, v))
    q, k, v = map(exchange, (q, k, v), specs)
    out = attention(q, k, v, *map(whole_rows, rows, specs[3:]))
    if not in_order:
        out = builder.trace(lambda x, *table: to_rank_order(x, 2, inner, *table), out, *table)
    return builder.call(boundary.all_to_all, (out, 2, 1, call.query[1], axis, inner))


def ring_attention(
    builder: Builder,
    operands: list[fx.Node],
    specs: list[Spec],
    scale: float | None,
    call: Call,
    method: str,
    score: str | None = None,
    row: int | None = None,
) -> fx.Node:
    """One local operator, in line when the program is finished; across groups of ranks that exchange heads."""
    inner, size = call.exchanging(method), specs[1].dims[-2][0].size
    axis, place = (AXIS if inner == 1 else f"{AXIS}.outer{inner}"), builder.places[AXIS]
    how = ring.Ring(axis, call.parts // inner, size, call.causal, call.folded, scale, call.steps(inner), score, row)
    key = (how, len(operands))
    if key not in builder.operators:
        builder.operators[key] = ring.operator(*key)
    if inner > 1:
        place = builder.trace(lambda at: at // inner, place)
    return builder.call(operator.getitem, (builder.call(builder.operators[key], (*operands, place)), 0))


EMITTERS[attention.NAME] = emit_attention
EMITTERS[attention.INTERVAL] = emit_interval
