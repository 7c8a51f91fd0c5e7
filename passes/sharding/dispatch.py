"""How rows get to the experts that are spread over ranks, and back.

`all_gather`   an owner takes what is its own of all tokens; results are a sum over owners
`dropless`     each source sends each owner its rows, in a buffer as large as the worst case
`bounded`      the same with smaller buffers: `capacity` times an even share; rows beyond that are dropped

A rank sends, of T tokens of its own with k choices each, to each of the other owners: T tokens; T min(k, experts of an
owner) rows; capacity T k / D rows. As much comes back. Shapes are static, so buffers travel as a whole.

On one device, or where each rank has all experts, there is one owner and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

from passes.program import ir, routed
from passes.program.mesh import DATA_AXES
from passes.program.spec import Spec
from passes.sharding.place import fold, place_batch, split_dim

aten = torch.ops.aten
Way = Literal["auto", "all_gather", "dropless", "bounded"]


class Dispatch(Protocol):
    """The order of rows by expert, where each expert's end, how many rows all owners have; the way there and back."""

    order: fx.Node
    ends: fx.Node
    size: int
    among: int  # of how many rows an owner has one

    def there(self, before: fx.Node, table: fx.Node, share: int) -> fx.Node:
        """The rows of a table with one for `share` slots, by expert."""
        ...

    def back(self, before: fx.Node, rows: fx.Node) -> fx.Node:
        """Rows where their slots were."""
        ...


@dataclass(frozen=True)
class Routed:
    """Slots to be dispatched: the expert of each, of how many, so many slots a token."""

    ids: fx.Node
    groups: int
    share: int
    owners: int

    @property
    def each(self) -> int:
        """How many experts an owner has."""
        return -(-self.groups // self.owners)


@dataclass(frozen=True)
class Traffic:
    """Rows that a rank sends to each other owner, there and back as many, and what becomes of those beyond them."""

    kind: Way
    sources: int
    capacity: int

    def dispatch(self, slots: Routed, before: fx.Node, ctx: ir.Context) -> Dispatch:
        """The operators that send so."""
        if self.kind == "all_gather":
            return AllGather(slots, before, ctx)
        return Exchange(slots, self, before, ctx)


def choose(kind: Way, factor: float, slots: Routed, program: ir.Program) -> tuple[Traffic, str]:
    """(how rows travel, why); raises Refused where tokens do not lie on the ranks that experts are spread over."""
    mesh, tokens = program.mesh, ir.example(slots.ids).shape[0] // slots.share
    holders = [axis for axis in mesh.axes if axis in (*DATA_AXES, *mesh.experts)]
    sources = math.prod(mesh[axis] for axis in holders)
    if slots.owners == 1:
        return Traffic("all_gather", 1, tokens), ""
    lie = placed_tokens(program, tokens)
    if kind in ("auto", "all_gather") and lie is None:
        return Traffic("all_gather", sources, tokens), "tokens are gathered: they are not those of a batch"
    if lie is None:
        why = "these tokens are not those of a batch, so where they lie is not known; use all_gather"
        raise ir.Refused("experts", slots.ids, f"passes.moe.dispatch: {kind}: {why}")
    own = math.prod(lie.local_shape(fold(program)))
    worst = own * min(slots.share, slots.each)
    rows = {
        "all_gather": own,
        "dropless": worst,
        "bounded": min(worst, math.ceil(factor * own * slots.share / slots.owners)),
    }
    said = f"rows that a rank sends to each other owner: {', '.join(f'{name} {n:,}' for name, n in rows.items())}"
    if kind == "auto":
        kind, said = "all_gather", f"{said}; all_gather sends fewest of those that drop none"
    return Traffic(kind, sources, rows[kind]), said


def placed_tokens(program: ir.Program, tokens: int) -> Spec | None:
    """Where so many tokens lie, as rows and positions of the batch; None if it has another number of them.

    Where experts are spread over `tp`, positions are too.
    """
    specs = (place_batch(given.spec.shape[:2], program.mesh) for given in program.inputs if given.kind == "batch")
    found = next((spec for spec in specs if math.prod(spec.shape) == tokens and len(spec.shape) == 2), None)
    return found and (split_dim(found, 1, "tp") if "tp" in program.mesh.experts else found)


class AllGather:
    """Each owner takes its own of all tokens."""

    def __init__(self, routed_: Routed, before: fx.Node, ctx: ir.Context):
        self.ctx, self.among = ctx, routed_.owners
        args = (routed_.ids, routed_.groups, routed_.owners)
        ids = new(before, routed.spread, args, ctx)
        self.order, self.ends = sorted_(before, ids, routed_.each, routed_.share, ctx)
        self.size = ir.example(self.order).numel()

    def there(self, before: fx.Node, table: fx.Node, share: int) -> fx.Node:
        """The rows of an owner's experts first, those of others behind them."""
        return new(before, routed.rows, (table, self.order, share), self.ctx)

    def back(self, before: fx.Node, rows: fx.Node) -> fx.Node:
        """A sum over owners: of each row one has the term."""
        if self.among > 1:
            rows = new(before, routed.known, (rows, self.ends), self.ctx)
        return new(before, routed.unorder, (rows, self.order), self.ctx)


class Exchange:
    """Each source sends each owner up to so many rows."""

    def __init__(self, routed_: Routed, traffic: Traffic, before: fx.Node, ctx: ir.Context):
        self.ctx, self.ids, self.groups = ctx, routed_.ids, routed_.groups
        args = (routed_.ids, routed_.groups, routed_.share, routed_.owners, traffic.sources, traffic.capacity)
        of = (*args, traffic.kind == "bounded")
        self.slots, self.counts = (new(before, target, of, ctx) for target in (routed.sends, routed.counts))
        ids = new(before, routed.received, (self.counts, traffic.capacity), ctx)
        self.order, self.ends = sorted_(before, ids, routed_.each, 1, ctx)
        self.size = ir.example(self.order).numel()
        self.among = max(1, self.size // ir.example(routed_.ids).shape[0])

    def there(self, before: fx.Node, table: fx.Node, share: int) -> fx.Node:
        """The rows that came, by expert, places that are empty behind them."""
        sent = new(before, routed.pack, (table, self.slots, self.ids, share), self.ctx)
        return new(before, routed.arrange, (sent, self.order), self.ctx)

    def back(self, before: fx.Node, rows: fx.Node) -> fx.Node:
        """The rows that come back; zero where one was dropped."""
        came = new(before, routed.restore, (rows, self.order), self.ctx)
        return new(before, routed.unpack, (came, self.slots, self.ids), self.ctx)

    def dropped(self, before: fx.Node) -> fx.Node:
        """How many rows find no room, of all ranks together, int64 []."""
        theirs = new(before, aten.lt.Scalar, (self.ids, self.groups), self.ctx)
        counts = [new(before, aten.sum.default, (x,), self.ctx) for x in (theirs, self.counts)]
        return new(before, aten.sub.Tensor, tuple(counts), self.ctx)


def sorted_(before: fx.Node, ids: fx.Node, groups: int, share: int, ctx: ir.Context) -> Sequence[fx.Node]:
    """(the order of slots by expert, where each expert's end), for each owner."""
    return [new(before, target, (ids, groups, share), ctx) for target in (routed.order, routed.ends)]


def new(before: fx.Node, target: Any, args: tuple[Any, ...], ctx: ir.Context) -> fx.Node:
    """An operator in the graph before another, of whose origin it is."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    with ctx.fake_mode, torch.no_grad():
        ir.set_value(node, target(*fx.map_arg(args, ir.value)))
    ir.copy_origin(node, before)
    return node
