"""Context parallelism: attention over a sequence that `cp` shards, by a method chosen for each call (`call.py`).

    ring         keys and values travel around the ranks (`passes/context/ring.py`): O(S/P) of them a rank
    all_gather   keys and values are gathered, one kernel call: any mask, also with a gradient
    ulysses      heads are exchanged for sequence; each rank attends with its heads over all of it (arXiv 2309.14509)
    hybrid       ulysses among U neighbours, ring across P/U such groups (arXiv 2405.07719)

The operator's record (`attention.py`) says what it computes in each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from passes.context import ring
from passes.context.attention import AttentionOp, Nodes, Specs
from passes.context.call import AttentionCall
from passes.ir import ir
from passes.ir.layout import run_starts, to_natural_order, to_rank_order
from passes.ir.mesh import BLOCKS
from passes.ir.mesh import SEQUENCE_AXIS as AXIS
from passes.ir.spec import Spec
from passes.ops import reshard
from passes.trace.builder import Builder, MethodChoice


def emit(
    record: AttentionOp, builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, results: Specs
) -> fx.Node:
    """Insert attention of the rank's queries; if keys are sharded on `cp` like queries, use the configured method."""
    if AXIS not in specs[1].sharded or specs[1].dims[-2][0].axes != (AXIS,):
        return record.local(builder, node, operands, None)
    call = replace(record.call(builder, node, operands, specs), forms=record.forms)
    method, reason = call.choose(builder.context_method)
    if not method:
        raise ir.Refused("shard", node, f"{node.target} cannot run over mesh.{AXIS}={call.parts}: {reason}")
    builder.methods[node] = MethodChoice(method, reason, note(node, call, method, reason))
    as_held, runs = record.bounds is not None and bool(specs[1].order.table), None
    if as_held and method in ("all_gather", "ulysses"):
        runs = builder.trace(torch.flatten, starts_of(builder, specs[1], 1))
    if method == "all_gather":
        return record.gathered(builder, node, operands, specs, runs)  # type: ignore[misc]
    inner = call.exchange_size(method)

    def attention(operands: Nodes) -> fx.Node:
        if inner == call.parts:
            return record.local(builder, node, operands, runs)
        return record.ring(builder, node, operands, specs, call, method)  # type: ignore[misc]

    if inner == 1:
        return attention(operands)
    return exchange_heads(builder, operands, specs, call, inner, attention, heads_of(record, node), as_held)


def heads_of(record: AttentionOp, node: fx.Node) -> list[int | None]:
    """Return, for each operand after values, its dim of query heads, or None if it has none."""
    query, _, _, *others = record.rule(node).operands
    return [dims.index(query[1]) if query[1] in dims else None for dims in others]


def note(node: fx.Node, call: AttentionCall, method: str, reason: str) -> str:
    """Return a line for the report."""
    rings = method in ("ring", "hybrid") and call.pairs is not None
    steps = f"; needed steps: {call.steps(call.exchange_size(method))}" if rings else ""
    sent, held_bytes = call.sent_bytes(method), call.kept_bytes(method)
    choice = f"%{node.name} ({ir.source(node)}): {method} over {AXIS}, {reason}{steps}"
    return f"{choice}; {sent:,} bytes sent, {held_bytes:,} bytes of keys and values held at once"


def gather(builder: Builder, x: fx.Node, spec: Spec) -> fx.Node:
    """Gather a sequence from the ranks that share it; gradients of the copies are summed."""
    dims = (*spec.dims[:-2], (replace(spec.dims[-2][0], axes=()), *spec.dims[-2][1:]), spec.dims[-1])
    return builder.convert(x, spec, replace(spec, dims=dims, replicate=(*spec.replicate, AXIS)), True, None)


def gather_as_held(builder: Builder, x: fx.Node, spec: Spec) -> fx.Node:
    """Gather a sequence in rank order: the entries of one rank after those of the next, with padding."""
    parts, dim = builder.mesh[AXIS], len(spec.dims) - 2
    size = parts * ir.example(x).shape[dim]
    return builder.call(reshard.all_gather, (x, dim, AXIS, parts, size, ir.example(x).dtype, None))


def starts_of(builder: Builder, spec: Spec, inner: int) -> fx.Node:
    """Return the first position of each key run of each group of `inner` ranks, in its order: i64[P / inner, runs]."""
    mesh, (factor, *_) = builder.mesh, spec.dims[-2]
    parts, chunk = mesh[AXIS] // inner, factor.local(mesh) // factor.order.chunks
    if factor.order.table:
        return builder.trace(lambda table: (table * chunk).view(parts, -1), builder.coordinates[BLOCKS])
    zigzag = factor.order.zigzag
    return builder.trace(lambda at: run_starts(parts, inner * chunk, zigzag, at.device), builder.coordinates[AXIS])


def exchange_heads(
    builder: Builder,
    operands: Nodes,
    specs: Specs,
    call: AttentionCall,
    inner: int,
    attention: Callable[[Nodes], fx.Node],
    heads: list[int | None],
    as_held: bool,
) -> fx.Node:
    """Exchange heads for sequence among `inner` neighbours, attend, and exchange sequence for heads.

    Operands after values (`specs` 3 and on) are gathered along the dim that cp shards. If one differs by head along its
    dim in `heads`, a rank takes the entries of its heads. Entries are put into natural order unless `as_held`.
    """
    q, k, v, *rows = operands
    parts, axis = call.parts, AXIS if inner == call.parts else f"{AXIS}.inner{inner}"
    order = specs[1].order
    in_order = as_held or order.is_plain
    table = [builder.coordinates[BLOCKS]] if order.table else []

    def natural(x: fx.Node, spec: Spec, dim: int, size: int) -> fx.Node:
        if as_held:
            return x
        length = spec.dims[dim][0].size if inner == parts else size
        if in_order:
            return builder.trace(lambda x: x.narrow(dim, 0, length), x)
        return builder.trace(lambda x, *table: to_natural_order(x, dim, inner, length, *table), x, *table)

    def exchange(x: fx.Node, spec: Spec) -> fx.Node:
        size = inner * ir.example(x).shape[2]
        return natural(builder.call(reshard.all_to_all, (x, 1, 2, size, axis, inner)), spec, 2, size)

    def own_heads(x: fx.Node, dim: int | None) -> fx.Node:
        if dim is None:
            return x
        return builder.trace(
            lambda x, at: x.unflatten(dim, (inner, -1)).index_select(dim, (at % inner).view(1)).squeeze(dim),
            x, builder.coordinates[AXIS],
        )  # fmt: skip

    def whole_rows(x: fx.Node, spec: Spec, heads: int | None) -> fx.Node:
        x = own_heads(x, heads)
        if AXIS not in spec.sharded:
            return x
        (dim,) = (d for d, factors in enumerate(spec.dims) if any(AXIS in f.axes for f in factors))
        size = inner * ir.example(x).shape[dim]
        return natural(
            builder.call(reshard.all_gather, (x, dim, axis, inner, size, ir.example(x).dtype, None)), spec, dim, size
        )

    if (copies := call.copies(inner)) > 1:
        k, v = (builder.trace(lambda x: x.repeat_interleave(copies, 1), x) for x in (k, v))
    q, k, v = map(exchange, (q, k, v), specs)
    out = attention([q, k, v, *map(whole_rows, rows, specs[3:], heads)])
    if not in_order:
        out = builder.trace(lambda x, *table: to_rank_order(x, 2, inner, *table), out, *table)
    return builder.call(reshard.all_to_all, (out, 2, 1, call.query[1], axis, inner))


def ring_attention(
    builder: Builder,
    operands: list[fx.Node],
    specs: list[Spec],
    scale: float | None,
    call: AttentionCall,
    method: str,
    score: str | None = None,
    row: int | None = None,
    has_sink: bool = False,
) -> fx.Node:
    """Insert a ring; across groups, if they exchange heads."""
    inner, size = call.exchange_size(method), specs[1].dims[-2][0].size
    axis, axis_index = (AXIS if inner == 1 else f"{AXIS}.outer{inner}"), builder.coordinates[AXIS]
    definition = ring.Ring(
        axis, call.parts // inner, size, call.causal, call.zigzag, scale, call.steps(inner), score, row, has_sink
    )
    if inner > 1:
        axis_index = builder.trace(lambda at: at // inner, axis_index)
    return in_ring(builder, definition, operands, axis_index)


def in_ring(builder: Builder, definition: ring.Ring, operands: Nodes, axis_index: fx.Node) -> fx.Node:
    """Insert a ring as one local operator, inlined when the program is finished."""
    key = (definition, len(operands))
    if key not in builder.operators:
        builder.operators[key] = ring.operator(*key)
    return builder.call(operator.getitem, (builder.call(builder.operators[key], (*operands, axis_index)), 0))
