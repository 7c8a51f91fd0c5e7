"""The record of `ct::interval_attention`, in which each query sees an interval of keys."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial

from torch import fx

from passes.context import attention, flex, interval_cpu  # noqa: F401, the kernel of the CPU
from passes.context.attention import AttentionKernel, AttentionOp, Nodes, Specs, attention_rule
from passes.context.balance import ranks_that_meet
from passes.context.call import AttentionCall
from passes.context.context import gather, gather_as_held, in_ring, ring_attention, starts_of
from passes.context.ring import Ring
from passes.ir import ir
from passes.ir.mesh import HOPS
from passes.ir.slices import constant
from passes.ops.attend import attend, attend_backward, interval_attention
from passes.rules.base import Rule, tensor_operands
from passes.trace.builder import Builder


def rule(node: fx.Node) -> Rule:
    """Return the rule: first[b, s] and last[b, s] next to queries, keys and values.

    Terms and sinks have the dims of scores, each of which may have size 1, and do not vary along keys.
    """
    further = len(tensor_operands(node)) - 5
    return attention_rule(node, "bs", "bs", *["bhs1"] * further, pad_safe={3: 0.0, 4: 0.0})


def local(builder: Builder, node: fx.Node, operands: Nodes, runs: fx.Node | None) -> fx.Node:
    """Attend with the queries' bounds to keys at the positions that `runs` gives."""
    q, k, v, first, last, *terms = operands
    if has_sink(node):
        return with_sink(builder, node, operands, runs)
    results = builder.call(attend, (q, k, v, first, last, runs, terms, *node.args[-2:]))
    return builder.call(operator.getitem, (results, 0))


def with_sink(builder: Builder, node: fx.Node, operands: Nodes, runs: fx.Node | None) -> fx.Node:
    """Attend as `local` with a sink: in a ring of one rank, to whose result it is added."""
    scale, score = node.args[-2:]
    starts = builder.trace(lambda x: x.new_zeros(1, 1), operands[3])
    if runs is not None:
        starts = builder.trace(lambda x: x.view(1, -1), runs)
    size = ir.example(operands[1]).shape[2]
    alone = Ring("", 1, size, False, False, scale, (0,), score, has_sink=True)  # type: ignore[arg-type]
    return in_ring(builder, alone, [*operands, starts], builder.trace(lambda x: x.new_zeros(()), operands[3]))


def gather_form(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, runs: fx.Node | None) -> fx.Node:
    """Gather keys and values, in rank order if their positions are known, and attend."""
    q, k, v, *rows = operands
    together = gather if runs is None else gather_as_held
    return local(builder, node, [q, *map(partial(together, builder), (k, v), specs[1:3]), *rows], runs)


def ring_form(
    builder: Builder, node: fx.Node, operands: Nodes, specs: Specs, call: AttentionCall, method: str
) -> fx.Node:
    """Insert a ring: bounds stay with their queries, keys come with their positions."""
    scale, score = node.args[-2:]
    inner = call.exchange_size(method)
    row = builder.row_of_hops(bounds(node), inner) if call.pairs is None else None
    ring_operands = [
        *operands,
        starts_of(builder, specs[1], inner),
        *([] if row is None else [builder.coordinates[HOPS]]),
    ]
    options = scale, call, method, score, row, has_sink(node)
    return ring_attention(builder, ring_operands, specs, *options)  # type: ignore[arg-type]


def call_of(builder: Builder, node: fx.Node, operands: Nodes, specs: Specs) -> AttentionCall:
    """Return the call as its rank sees it, with the ranks that meet if the bounds are the same for every batch."""
    call, (first, last) = attention.call_of(builder, node, operands, specs), map(constant, bounds(node))
    pairs = None
    if first is not None and last is not None and not call.in_blocks:
        meet = ranks_that_meet(first, last, builder.mesh, specs[1].order)
        pairs = frozenset((i, j) for i, j in meet.nonzero().tolist())
    return replace(call, pairs=pairs, in_blocks=False)


def has_sink(node: fx.Node) -> bool:
    """Return True if a call has a sink."""
    return bool(node.args[6])


def bounds(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the first and last key that each query of a call sees."""
    first, last = node.args[3:5]
    return first, last  # type: ignore[return-value]


RECORD = AttentionOp(
    interval_attention,
    rule,
    local,
    kernels=(
        AttentionKernel(
            attend,
            attend_backward,
            compiled={"cuda": (flex.forward, flex.backward)},
            on_host="reads its bounds on the host if it is not compiled; use lower.backend=inductor",
        ),
    ),
    bounds=bounds,
    call=call_of,
    gathered=gather_form,
    ring=ring_form,
)
