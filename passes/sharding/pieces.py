"""Put together again what a model takes apart along dim 0 only to join it: the features of a batch's images.

    parts = split(x, [4, 4]); cat([view(parts[0], [8, d]), view(parts[1], [8, d])])    ->    reshape(x, [16, d])

Pieces along dim 0 are consecutive in memory order, and a reshape keeps that order. Apart, every rank would gather all
rows: a piece has rows of one rank only.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from passes.ir import ir
from passes.ir.operators import argument, name_of
from passes.trace.editor import Editor

RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "alias")
CUTS = ("split", "split_with_sizes", "unbind", "chunk")


def rejoin(program: ir.Program, ctx: ir.Context) -> int:
    """Replace every concatenation of all pieces of a tensor by a reshape of the tensor; return their number."""
    count = 0
    for node in program.calls():
        if name_of(node) == "cat" and (x := whole(node)) is not None:
            shape = list(ir.example(node).shape)
            node.replace_all_uses_with(Editor.before(node, ctx).call(torch.ops.aten.reshape.default, (x, shape)))
            program.graph.erase_node(node)
            count += 1
    return count


def whole(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which a concatenation along dim 0 has all pieces, in order and reshaped at most.

    A tensor that is joined with no other, along any dim, is one piece.
    """
    if len(node.args[0]) == 1:  # type: ignore[arg-type]
        return node.args[0][0]  # type: ignore[index, return-value]
    pieces = [origin(part) for part in node.args[0]]  # type: ignore[union-attr]
    cut = pieces[0].args[0] if pieces[0].target is operator.getitem else None
    if not isinstance(cut, fx.Node) or name_of(cut) not in CUTS or argument(cut, "dim") != 0:
        return None
    in_order = all(p.target is operator.getitem and p.args == (cut, i) for i, p in enumerate(pieces))
    is_along_rows = argument(node, "dim") % ir.example(node).dim() == 0
    return cut.args[0] if in_order and is_along_rows and len(pieces) == len(ir.value(cut)) else None  # type: ignore[return-value]


def origin(part: fx.Node) -> fx.Node:
    """Return the value of which a node is a reshape, through several of them."""
    while name_of(part) in RESHAPES:
        part = part.args[0]  # type: ignore[assignment]
    return part
