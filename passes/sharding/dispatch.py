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
from typing import Literal

import torch
from torch import fx

from passes.program import ir, routed
from passes.program.editor import Editor
from passes.program.mesh import DATA_AXES
from passes.program.routed import Way
from passes.program.spec import Spec
from passes.sharding.place import place_batch, split_dim

aten = torch.ops.aten
Method = Literal["auto", "all_gather", "dropless", "bounded"]


@dataclass(frozen=True)
class Part:
    """Rows that go to experts together, and come back."""

    ids: fx.Node
    way: Way
    groups: fx.Node  # what experts they are for

    @property
    def among(self) -> float:
        """Of how many of the rows that it is given an owner multiplies one."""
        rows = self.way.owners * self.way.sources * self.way.capacity
        return max(1.0, rows / ir.example(self.ids).shape[0]) if rows else float(self.way.owners)


def parts_of(ids: fx.Node, way: Way, chunks: int, edit: Editor) -> list[Part]:
    """Rows that travel do so in chunks, so that one travels while another is computed."""
    chunks = min(chunks, way.capacity) if way.sources else 1
    ways = [way._replace(part=i, parts=chunks) for i in range(chunks)]
    return [Part(ids, part, edit.call(routed.groups, (ids, list(part)))) for part in ways]


def choose(kind: Method, factor: float, ids: fx.Node, way: Way, program: ir.Program) -> tuple[Way, str]:
    """(the way with what rows it takes, why); raises Refused where tokens are not where experts are spread."""
    mesh, tokens = program.mesh, ir.example(ids).shape[0] // way.share
    if way.owners == 1:
        return way, ""
    lie = placed_tokens(program, tokens)
    if kind in ("auto", "all_gather") and lie is None:
        return way, "all_gather: tokens are gathered: they are not those of a batch"
    if lie is None:
        why = "these tokens are not those of a batch, so where they lie is not known; use all_gather"
        raise ir.Refused("experts", ids, f"passes.moe.dispatch: {kind}: {why}")
    own = math.prod(lie.local_shape(mesh))
    worst = own * min(way.share, way.each)
    rows = {
        "all_gather": own,
        "dropless": worst,
        "bounded": min(worst, math.ceil(factor * own * way.share / way.owners)),
    }
    said = f"rows that a rank sends to each other owner: {', '.join(f'{name} {n:,}' for name, n in rows.items())}"
    if kind in ("auto", "all_gather"):
        return way, f"all_gather: {said}{'; all_gather sends fewest of those that drop none' * (kind == 'auto')}"
    sources = math.prod(mesh[axis] for axis in mesh.axes if axis in (*DATA_AXES, *mesh.experts))
    return way._replace(sources=sources, capacity=rows[kind], drops=kind == "bounded"), f"{kind}: {said}"


def placed_tokens(program: ir.Program, tokens: int) -> Spec | None:
    """Where so many tokens lie, as rows and positions of the batch; None if it has another number of them.

    Where experts are spread over `tp`, positions are too.
    """
    placed = (place_batch(given.spec.shape[:2], program.mesh) for given in program.inputs if given.kind == "batch")
    specs = (spec.ordered(program.order) for spec in placed)
    found = next((spec for spec in specs if math.prod(spec.shape) == tokens and len(spec.shape) == 2), None)
    return found and (split_dim(found, 1, "tp") if "tp" in program.mesh.experts else found)


def dropped(parts: Sequence[Part], edit: Editor) -> fx.Node:
    """How many rows find no room in what is exchanged, of all ranks together, int64 []."""
    ids, way = parts[0].ids, parts[0].way
    left = edit.call(aten.sum.default, (edit.call(aten.lt.Scalar, (ids, way.groups)),))
    for part in parts:
        left = edit.call(aten.sub.Tensor, (left, edit.call(routed.sent, (ids, list(part.way)))))
    return left
