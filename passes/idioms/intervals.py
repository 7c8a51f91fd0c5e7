"""Rewrite attention in which each query sees an interval of keys as one operator that takes the interval's bounds.

    scaled_dot_product_attention(q, k, v, (i >= j) & (ids_i == ids_j))
becomes
    interval_attention(q, k, v, first, last)        first, last: i64[b, s], made once for all layers that share the mask

`masks.py` reads the mask; `match_attention.py` reads attention that a model writes out, with a function of its scores.
No mask is in memory any more, blocks that no query sees are not computed, and every method of context parallelism sends
bounds along with queries. The kernel is `interval_cpu.py` on the CPU and `flex.py` on CUDA. Attention is left as it is,
with a reason in the report, if it has another mask, a mask or term that may need a gradient, dropout, or no kernel on
the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from passes.context import flex
from passes.context.kernels import wide_dtype
from passes.context.sdpa import NAMES, SDPA, arguments
from passes.idioms.masks import RANK, Interval, LeafValues, NotAnInterval, Reader, Row
from passes.idioms.match_attention import (
    SOFTMAX,
    Attention,
    Scores,
    as_source,
    check_kinds,
    check_ranks,
    single_heads,
    written_attention,
)
from passes.ir import ir
from passes.ir.stages import Stage
from passes.ops.attend import interval_attention
from passes.trace.editor import Editor, laid_out_as

DEFAULTS = dict(zip(NAMES, (None, None, None, None, 0.0, False, None, False)))
Masks = tuple[tuple[fx.Node, bool], ...]
Bounds = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class Intervals(ir.Pass):
    """Replace attention masks by bounds."""

    name = "intervals"
    takes = (Stage.CAPTURED,)
    after = ("cast",)  # it knows operators by the model's names

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        inputs_by_node = list(zip(program.placeholders(), program.inputs))
        batch = frozenset(node for node, item in inputs_by_node if item.kind == "batch")
        differentiable = frozenset(node for node, item in inputs_by_node if item.kind == "parameter")
        cache = BoundsCache(batch, ctx)
        count, notes = 0, []
        for node in list(program.calls()):
            try:
                if (attention := attention_at(node, differentiable)) is not None:
                    insert(attention, cache.bounds(attention), ctx)
                    count += 1
            except NotAnInterval as reason:
                outcome = "its mask stays in memory" if node.target is SDPA else "stays written out"
                notes.append(f"%{node.name} ({ir.source(node)}): {outcome}: {reason}")
        program.graph.eliminate_dead_code()
        nodes = zip(program.placeholders(), program.inputs)
        inputs = tuple(replace(item, runs=item.runs or node in cache.runs) for node, item in nodes)
        program = replace(program, inputs=inputs)
        return program, ir.Report({"attention_by_interval": count}, tuple(notes))


def attention_at(node: fx.Node, differentiable: frozenset[fx.Node]) -> Attention | None:
    """Return the attention of a call with a mask, or around a softmax; None for another node. Raises NotAnInterval."""
    if node.target in SOFTMAX:
        return written_attention(node, differentiable)
    if node.target is not SDPA:
        return None
    args = DEFAULTS | arguments(node)
    q, k, v, mask = (args[name] for name in NAMES[:4])
    if mask is None:
        return None
    if args["dropout_p"]:
        raise NotAnInterval("dropout draws a random number for each pair")
    if args["is_causal"]:
        raise NotAnInterval("is_causal is set too")
    check_ranks(q, k, v)
    scale = 1 / math.sqrt(ir.example(q).shape[-1]) if args["scale"] is None else float(args["scale"])
    k, v = single_heads(k, v)
    masks: list[tuple[fx.Node, bool]] = [(mask, False)]  # type: ignore[list-item]
    zeroed = ir.example(mask).dtype == torch.bool
    if not zeroed:
        scores = Scores(node, differentiable)
        if not scores.adds_mask(as_source(mask)):
            raise NotAnInterval(f"a mask of {ir.example(mask).dtype}")
        masks = list(scores.masks)
    attention = Attention(node, q, k, v, scale, masks=masks, zeroed=zeroed)
    check_kinds(attention)
    return attention


@dataclass
class BoundsCache:
    """The masks read, each with its bounds or its obstacle, and the inputs whose equal entries must be adjacent."""

    batch: frozenset[fx.Node]
    ctx: ir.Context
    results: dict[tuple[Masks, bool, int, int], Bounds | NotAnInterval] = field(default_factory=dict)
    runs: set[fx.Node] = field(default_factory=set)

    def bounds(self, attention: Attention) -> Bounds:
        """Return the first and last key that each query sees, i64[b or 1, s]; raises NotAnInterval."""
        q, k, v = map(ir.example, (attention.q, attention.k, attention.v))
        if obstacle := why_no_kernel(q, k, v):  # it depends on the tensors, not only on the mask
            raise NotAnInterval(obstacle)
        queries, keys = q.shape[2], v.shape[2]
        key = tuple(attention.masks), attention.zeroed, queries, keys
        if key not in self.results:
            try:
                self.results[key] = self.read(attention, queries, keys)
            except NotAnInterval as reason:
                self.results[key] = reason
        if isinstance(outcome := self.results[key], NotAnInterval):
            raise outcome
        return outcome

    def read(self, attention: Attention, queries: int, keys: int) -> Bounds:
        """Return the bounds of masks that were not read before; raises NotAnInterval."""
        if queries < 2 or keys < 2:
            raise NotAnInterval("a single query or key")
        reader = Reader(queries, keys, self.batch)
        interval = reader.intersect([condition for mask in attention.masks for condition in reader.let_through(*mask)])
        if not (attention.zeroed or interval.itself and queries <= keys):
            raise NotAnInterval("a query might see no key, and would then attend to all keys equally")
        bounds = emit(attention.result, reader, interval, ir.example(attention.q).device, self.ctx)
        self.runs |= reader.runs.keys()
        return bounds


def why_no_kernel(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the reason why these tensors have no kernel by interval, empty if they have one."""
    if q.device.type == "cuda":
        return flex.why_not(q, k, v)
    return "" if q.device.type == "cpu" else f"there is no kernel by interval for {q.device.type}"


def emit(node: fx.Node, reader: Reader, interval: Interval, device: torch.device, ctx: ir.Context) -> Bounds:
    """Insert operators that compute an interval's bounds."""
    leaves, queries, keys = list(reader.leaves), reader.queries, reader.keys

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        leaf_values = LeafValues(dict(zip(leaves, values)), device)

        def bound(row: Row | None, other: int) -> Tensor:
            positions = torch.as_tensor(other if row is None else row.value(leaf_values), device=device)
            positions = (
                positions.to(torch.int64).clamp(0, keys).view([1] * (RANK - positions.dim()) + list(positions.shape))
            )
            if positions.shape[1] > 1:
                raise NotAnInterval("the mask differs by head")
            return positions.expand(-1, -1, queries, -1).reshape(-1, queries)

        return torch.broadcast_tensors(bound(interval.first, 0), bound(interval.last, keys))  # type: ignore[return-value]

    first, last = Editor.before(node, ctx).trace(body, *leaves, key=body)
    return first, last


def insert(attention: Attention, bounds: Bounds, ctx: ir.Context) -> None:
    """Replace an attention's result by attention by interval."""
    sinks, example = [attention.sink] if attention.sink else [], ir.example(attention.result)
    leaves, kind = [x.node for x in (*attention.terms, *sinks)], wide_dtype(ir.example(attention.q).dtype)

    def body(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *values: Tensor) -> Tensor:
        leaf_values = LeafValues(dict(zip(leaves, values)), q.device)
        terms, last_keys = ([x.align(leaf_values).to(kind) for x in part] for part in (attention.terms, sinks))
        k = k.transpose(-1, -2) if attention.turned else k
        out = interval_attention(q, k, v, first, last, terms, last_keys, attention.scale, attention.score)
        return laid_out_as(example, out).to(example.dtype)

    out = Editor.before(attention.result, ctx).trace(
        body, attention.q, attention.k, attention.v, *bounds, *leaves, key=body
    )
    attention.result.replace_all_uses_with(out)
    attention.result.graph.erase_node(attention.result)
