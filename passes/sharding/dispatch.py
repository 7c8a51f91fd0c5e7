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
from passes.sharding.place import place_batch, split_dim

aten = torch.ops.aten
Way = Literal["auto", "all_gather", "dropless", "bounded"]


@dataclass(frozen=True)
class Writer:
    """Writes operators before a node, as if they came from another."""

    place: fx.Node
    origin: fx.Node
    ctx: ir.Context

    def call(self, target: Any, *args: Any) -> fx.Node:
        """An operator."""
        with self.place.graph.inserting_before(self.place):
            node = self.place.graph.call_function(target, args)
        return self.written(node)

    def written(self, node: fx.Node) -> fx.Node:
        """A node that stands there, with what it yields and where it comes from."""
        with self.ctx.fake_mode, torch.no_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), ir.value)
            ir.set_value(node, node.target(*args, **kwargs))  # type: ignore[operator]
        ir.copy_origin(node, self.origin)
        return node


class Dispatch(Protocol):
    """Rows that go to experts together, and come back: their order by expert, and where each expert's end."""

    order: fx.Node
    ends: fx.Node
    among: float  # of how many of the rows it is given an owner multiplies one

    def there(self, write: Writer, table: fx.Node, share: int) -> fx.Node:
        """The rows of a table with one for `share` slots, by expert."""
        ...

    def leave(self, write: Writer, rows: fx.Node) -> fx.Node:
        """What experts made of rows, ready to go back."""
        ...

    def back(self, write: Writer, rows: fx.Node) -> fx.Node:
        """Those rows where their slots were, zero where a slot is not of this part."""
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

    def parts(self, slots: Routed, write: Writer, chunks: int) -> list[Dispatch]:
        """What sends so: rows that travel do so in `chunks`, so that one travels while another is computed."""
        if self.kind == "all_gather":
            return [AllGather(slots, write)]
        return [Exchange(slots, self, write, i, chunks) for i in range(min(chunks, self.capacity))]


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
    own = math.prod(lie.local_shape(mesh))
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
    placed = (place_batch(given.spec.shape[:2], program.mesh) for given in program.inputs if given.kind == "batch")
    specs = (spec.ordered(program.order) for spec in placed)
    found = next((spec for spec in specs if math.prod(spec.shape) == tokens and len(spec.shape) == 2), None)
    return found and (split_dim(found, 1, "tp") if "tp" in program.mesh.experts else found)


class AllGather:
    """Each owner takes its own of all tokens."""

    def __init__(self, slots: Routed, write: Writer):
        self.among = float(slots.owners)
        ids = write.call(routed.spread, slots.ids, slots.groups, slots.owners)
        self.order, self.ends = sorted_(write, ids, slots.each, slots.share)

    def there(self, write: Writer, table: fx.Node, share: int) -> fx.Node:
        """The rows of an owner's experts first, those of others behind them."""
        return write.call(routed.rows, table, self.order, share)

    def leave(self, write: Writer, rows: fx.Node) -> fx.Node:
        """Zeros in place of others' rows."""
        return write.call(routed.known, rows, self.ends) if self.among > 1 else rows

    def back(self, write: Writer, rows: fx.Node) -> fx.Node:
        """A sum over owners: of each row one has the term."""
        return write.call(routed.unorder, rows, self.order)


class Exchange:
    """Each source sends each owner up to so many rows, this part of them."""

    def __init__(self, slots: Routed, traffic: Traffic, write: Writer, part: int, parts: int):
        self.ids = slots.ids
        sizes = (slots.groups, slots.share, slots.owners, traffic.sources, traffic.capacity)
        of = (self.ids, *sizes, traffic.kind == "bounded", part, parts)
        self.slots, self.counts = (write.call(target, *of) for target in (routed.sends, routed.counts))
        capacity = ir.example(self.slots).shape[2]
        ids = write.call(routed.received, self.counts, capacity)
        self.order, self.ends = sorted_(write, ids, slots.each, 1)
        rows = slots.owners * traffic.sources * traffic.capacity
        self.among = max(1.0, rows / ir.example(self.ids).shape[0])

    def there(self, write: Writer, table: fx.Node, share: int) -> fx.Node:
        """The rows that came, by expert, places that are empty behind them."""
        return write.call(routed.arrange, write.call(routed.pack, table, self.slots, self.ids, share), self.order)

    def leave(self, write: Writer, rows: fx.Node) -> fx.Node:
        """The rows in the places in which they came."""
        return write.call(routed.restore, rows, self.order)

    def back(self, write: Writer, rows: fx.Node) -> fx.Node:
        """The rows that come back; zero where one was dropped."""
        return write.call(routed.unpack, rows, self.slots, self.ids)


def dropped(parts: Sequence[Dispatch], slots: Routed, write: Writer) -> fx.Node:
    """How many rows find no room in what is exchanged, of all ranks together, int64 []."""
    left = write.call(aten.sum.default, write.call(aten.lt.Scalar, slots.ids, slots.groups))
    for part in parts:
        assert isinstance(part, Exchange)
        left = write.call(aten.sub.Tensor, left, write.call(aten.sum.default, part.counts))
    return left


def sorted_(write: Writer, ids: fx.Node, groups: int, share: int) -> Sequence[fx.Node]:
    """(the order of slots by expert, where each expert's end), for each owner."""
    return [write.call(target, ids, groups, share) for target in (routed.order, routed.ends)]
