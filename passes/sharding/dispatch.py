"""Choose how rows get to experts that are spread over ranks, and back.

`all_gather`   owners gather all tokens and take their own rows; results are summed over owners
`dropless`     each source sends each owner its rows, in a buffer of the worst-case size
`bounded`      the same with smaller buffers: `capacity` times an even share; rows beyond that are dropped

With T tokens of its own and k choices for each, a rank sends each other owner T tokens (`all_gather`), T min(k, experts
of an owner) rows (`dropless`), or capacity T k / D rows (`bounded`). As much comes back. Shapes are static, so buffers
travel whole.

On one device, or if each rank has all experts, there is one owner and nothing is sent.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from passes.ir import ir
from passes.ir.mesh import DATA_AXES
from passes.ir.operators import is_operator, name_of
from passes.ir.spec import Spec
from passes.ops import routed
from passes.ops.routed import Way
from passes.rules import rule_of, tensor_operands
from passes.sharding.place import place_batch, split_dim
from passes.trace.editor import Editor

aten = torch.ops.aten
Method = Literal["auto", "all_gather", "dropless", "bounded"]


@dataclass(frozen=True)
class Part:
    """Rows that go to experts together, and come back together."""

    ids: fx.Node
    way: Way
    groups: fx.Node  # the rows' experts

    @property
    def among(self) -> float:
        """Rows that an owner gets for each row that it multiplies."""
        rows = self.way.owners * self.way.sources * self.way.capacity
        return max(1.0, rows / ir.example(self.ids).shape[0]) if rows else float(self.way.owners)


def parts_of(ids: fx.Node, way: Way, chunks: int, edit: Editor) -> list[Part]:
    """Split rows that travel into chunks, so that a chunk travels while another is computed."""
    chunks = min(chunks, way.capacity) if way.sources else 1
    ways = [way._replace(part=i, parts=chunks) for i in range(chunks)]
    return [Part(ids, part, edit.call(routed.groups, (ids, list(part)))) for part in ways]


def choose(kind: Method, factor: float, ids: fx.Node, way: Way, program: ir.Program) -> tuple[Way, str]:
    """Return (the way with its buffer sizes, the reason); raise Refused if the tokens' placement is unknown."""
    mesh, tokens = program.mesh, ir.example(ids).shape[0] // way.share
    if way.owners == 1:
        return way, ""
    placement = placed_tokens(program, tokens)
    if kind in ("auto", "all_gather") and placement is None:
        return way, "all_gather: tokens are gathered, because they are not those of a batch"
    if placement is None:
        problem = "these tokens are not those of a batch, so their placement is unknown; use all_gather"
        raise ir.Refused("experts", ids, f"passes.moe.dispatch: {kind}: {problem}")
    rank_tokens = math.prod(placement.local_shape(mesh))
    worst = rank_tokens * (min(way.share, way.each) if are_distinct(ids) else way.share)
    rows = {
        "all_gather": rank_tokens,
        "dropless": worst,
        "bounded": min(worst, math.ceil(factor * rank_tokens * way.share / way.owners)),
    }
    counts = f"rows that a rank sends to each other owner: {', '.join(f'{name} {n:,}' for name, n in rows.items())}"
    if kind in ("auto", "all_gather"):
        return way, f"all_gather: {counts}{'; all_gather sends the fewest without dropping any' * (kind == 'auto')}"
    sources = math.prod(mesh[axis] for axis in mesh.axes if axis in (*DATA_AXES, *mesh.experts))
    return way._replace(sources=sources, capacity=rows[kind], drops=kind == "bounded"), f"{kind}: {counts}"


def are_distinct(ids: fx.Node) -> bool:
    """Return True if the experts of a token are known to differ: they are the places of its largest scores."""
    while is_operator(ids) and rule_of(ids).moves:
        ids = tensor_operands(ids)[0]
    source = ids.args[0] if ids.target is operator.getitem else None
    return isinstance(source, fx.Node) and name_of(source) == "topk"


def placed_tokens(program: ir.Program, tokens: int) -> Spec | None:
    """Return the placement of `tokens` tokens as rows and positions of the batch; None if no input has that many.

    If experts are spread over `tp`, positions are too.
    """
    placed = (place_batch(input_.spec.shape[:2], program.mesh) for input_ in program.inputs if input_.kind == "batch")
    specs = (spec.ordered(program.order) for spec in placed)
    spec = next((spec for spec in specs if math.prod(spec.shape) == tokens and len(spec.shape) == 2), None)
    return spec and (split_dim(spec, 1, "tp") if "tp" in program.mesh.experts else spec)


def dropped(parts: Sequence[Part], edit: Editor) -> fx.Node:
    """Count the rows that find no room in the exchanged buffers, over all ranks; int64 []."""
    ids, way = parts[0].ids, parts[0].way
    unsent = edit.call(aten.sum.default, (edit.call(aten.lt.Scalar, (ids, way.groups)),))
    for part in parts:
        unsent = edit.call(aten.sub.Tensor, (unsent, edit.call(routed.sent, (ids, list(part.way)))))
    return unsent
