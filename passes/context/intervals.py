"""Attention that sees an interval of keys a query, whatever made its mask, as one operator with the interval's bounds.

    scaled_dot_product_attention(q, k, v, (i >= j) & (ids_i == ids_j))
becomes
    interval_attention(q, k, v, first, last)        first, last: i64[b, s], made once for all layers that share the mask

`passes/context/masks.py` reads the mask. No mask is in memory any more, blocks that nothing sees are not computed, and
every method of context parallelism takes bounds along with the queries. The kernel is `visible.py` on the CPU and
`flex.py` on CUDA. An attention with another mask, or a mask that may have a gradient, or with dropout, or one that the
device has no kernel for, is left as it is, and the report says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.context import flex, visible  # noqa: F401, the kernels
from passes.context.masks import RANK, Given, Interval, Reader, Row, Unknown
from passes.program import ir
from passes.program.attend import interval_attention
from passes.program.rewrite import before, laid_out_as

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DEFAULTS = dict(zip(NAMES, (None, None, None, None, 0.0, False, None, False)))


@dataclass(frozen=True)
class Intervals:
    """Give attention its bounds."""

    name: str = "intervals"
    requires: frozenset[str] = frozenset({"captured"})
    establishes: frozenset[str] = frozenset()

    def __call__(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        batch = frozenset(n for n, given in zip(program.placeholders(), program.inputs) if given.kind == "batch")
        reading = Reading(batch, ctx)
        taken, notes = 0, []
        for node in list(program.calls()):
            if node.target is SDPA and (given := call_of(node))["attn_mask"] is not None:
                try:
                    put(node, given, reading.bounds(node, given), ctx)
                    taken += 1
                except Unknown as why:
                    notes.append(f"%{node.name} ({ir.source(node)}): its mask stays in memory: {why}")
        program.graph.eliminate_dead_code()
        nodes = zip(program.placeholders(), program.inputs)
        inputs = tuple(replace(given, runs=given.runs or node in reading.runs) for node, given in nodes)
        program = replace(program, inputs=inputs)
        return program, ir.Report({"attention_by_interval": taken}, tuple(notes))


def call_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an attention by name."""
    return DEFAULTS | dict(zip(NAMES, node.args)) | node.kwargs


@dataclass
class Reading:
    """What was read of masks: the bounds that each has become, or why it has none; inputs of which runs are asked."""

    batch: frozenset[fx.Node]
    ctx: ir.Context
    known: dict[fx.Node, tuple[fx.Node, fx.Node] | Unknown] = field(default_factory=dict)
    runs: set[fx.Node] = field(default_factory=set)

    def bounds(self, node: fx.Node, given: Mapping[str, Any]) -> tuple[fx.Node, fx.Node]:
        """First and last of the keys that each query of a call sees, i64[b or 1, s]; raises Unknown."""
        mask = given["attn_mask"]
        if mask not in self.known:
            try:
                self.known[mask] = self.read(node, given)
            except Unknown as why:
                self.known[mask] = why
        if isinstance(found := self.known[mask], Unknown):
            raise found
        return found

    def read(self, node: fx.Node, given: Mapping[str, Any]) -> tuple[fx.Node, fx.Node]:
        """The same of a mask that is new."""
        q, k, v, mask = (ir.example(given[name]) for name in ("query", "key", "value", "attn_mask"))
        if given["dropout_p"]:
            raise Unknown("dropout draws for each pair")
        if why := why_no_kernel(q, k, v):
            raise Unknown(why)
        if q.dim() != 4 or mask.dtype != torch.bool or given["is_causal"]:
            raise Unknown(f"{q.dim()} dims, a mask of {mask.dtype}" + ", is_causal" * bool(given["is_causal"]))
        if q.shape[2] < 2 or k.shape[2] < 2:
            raise Unknown("a single query or key")
        reader = Reader(q.shape[2], k.shape[2], self.batch)
        interval = reader.interval(given["attn_mask"])
        found = emit(node, reader, interval, self.ctx)
        self.runs |= reader.runs.keys()
        return found


def why_no_kernel(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why these have no kernel by interval, empty if they have one."""
    if q.device.type == "cuda":
        return flex.why_not(q, k, v)
    return "" if q.device.type == "cpu" else f"there is no kernel by interval for {q.device.type}"


def emit(node: fx.Node, reader: Reader, interval: Interval, ctx: ir.Context) -> tuple[fx.Node, fx.Node]:
    """Operators that compute an interval's bounds."""
    leaves, device = list(reader.leaves), ir.example(node.args[0]).device  # type: ignore[arg-type]
    queries, keys = reader.queries, reader.keys

    def body(*values: Tensor) -> tuple[Tensor, Tensor]:
        given = Given(dict(zip(leaves, values)), device)

        def bound(row: Row | None, other: int) -> Tensor:
            found = torch.as_tensor(other if row is None else row.value(given), device=device)
            found = found.to(torch.int64).clamp(0, keys).view([1] * (RANK - found.dim()) + list(found.shape))
            if found.shape[1] > 1:
                raise Unknown("it differs by head")
            return found.expand(-1, -1, queries, -1).reshape(-1, queries)

        return bound(interval.first, 0), bound(interval.last, keys)

    first, last = before(node, body, leaves, ctx)
    return first, last


def put(node: fx.Node, given: Mapping[str, Any], bounds: tuple[fx.Node, fx.Node], ctx: ir.Context) -> None:
    """Put attention by interval in a call's place."""
    width = ir.example(given["query"]).shape[-1]
    scale = 1 / math.sqrt(width) if given["scale"] is None else float(given["scale"])

    def body(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return laid_out_as(ir.example(node), interval_attention(q, k, v, first, last, [], scale, ""))

    out = before(node, body, [given[name] for name in ("query", "key", "value")] + list(bounds), ctx)
    node.replace_all_uses_with(out)
    node.graph.erase_node(node)
