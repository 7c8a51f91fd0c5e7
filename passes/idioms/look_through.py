"""Look through views: the value whose entries a view shows in other places, and values that are one known number."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.ir import ir

aten = torch.ops.aten
COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default)
CASTS = (aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.type_as.default)
WHOLE = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
WIDE = {torch.int32, torch.int64}  # sums of positions do not overflow in these
ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
FULL = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)


def see_through(node: fx.Node) -> tuple[fx.Node, list[int | None]] | None:
    """Return (node under a view, for each of its dims the view's dim, from the right); None if `node` is no view."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    x: fx.Node = node.args[0]
    if not ir.is_tensor(x) or not ir.is_tensor(node):
        return None
    shape, view_shape = ir.example(x).shape, ir.example(node).shape
    rank = len(view_shape)
    cast = node.target in CASTS and ir.example(x).dtype in WHOLE and ir.example(node).dtype in WIDE
    if node.target in COPIES or cast:
        return x, [d - rank for d in range(len(shape))]
    if node.target is aten.expand.default:
        return x, [None if n == 1 else d - len(shape) for d, n in enumerate(shape)]
    if node.target in (aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.view.default,
                       aten.reshape.default, aten._unsafe_view.default):  # fmt: skip
        large_dims = [d for d, n in enumerate(view_shape) if n > 1]
        if [view_shape[d] for d in large_dims] != [n for n in shape if n > 1]:
            return None
        supply = iter(large_dims)
        return x, [None if n == 1 else next(supply) - rank for n in shape]
    if node.target in (aten.permute.default, aten.transpose.int, aten.t.default):
        order = order_of(node, len(shape))
        return x, [order.index(d) - rank if shape[d] > 1 else None for d in range(len(shape))]
    if node.target is aten.index.Tensor:
        return look_up(node, x)
    return None


def number_of(x: Any) -> float | None:
    """Return the number that a value is everywhere, None if it is not one known number."""
    if not isinstance(x, fx.Node):
        return x if isinstance(x, (int, float)) else None
    exact = ir.example(x).is_floating_point()
    while x.target in (*COPIES, *CASTS, aten.expand.default):
        x = x.args[0]  # type: ignore[assignment]
        exact = exact and ir.example(x).is_floating_point()
    if x.target in ZEROS:
        return 0.0
    fill = x.args[-1] if x.target in FULL else None
    return float(fill) if isinstance(fill, (int, float)) and (exact or fill == 0) else None


def keeps_numbers(node: fx.Node) -> bool:
    """Return True for a copy or a cast to floating point."""
    return node.target in COPIES or node.target in CASTS and ir.example(node).is_floating_point()


def order_of(node: fx.Node, rank: int) -> list[int]:
    """Return, for each dim of a permuted value, the dim of its operand."""
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr]
    a, b = (0, min(1, rank - 1)) if node.target is aten.t.default else (int(d) % rank for d in node.args[1:3])  # type: ignore
    order[a], order[b] = order[b], order[a]
    return order


def look_up(node: fx.Node, x: fx.Node) -> tuple[fx.Node, list[int | None]] | None:
    """Treat a look-up by positions as a view: `ids[b, j]` where b and j count along dims of the result."""
    into: list[int | None] = []
    indices: Any = node.args[1]
    if len(indices) != ir.example(x).dim():
        return None
    for index, size in zip(indices, ir.example(x).shape):
        if index is None or (at := counting_dim(index, size)) is None:
            return None
        into.append(at if size > 1 else None)
    used = [at for at in into if at is not None]
    return (x, into) if len(set(used)) == len(used) else None


def counting_dim(index: fx.Node, size: int) -> int | None:
    """Return the dim, from the right, along which an index counts 0, 1, ... `size` - 1; 0 for size 1; None if none."""
    if size == 1:
        return 0
    rank = ir.example(index).dim()
    dims: list[int | None] = [d - rank for d in range(rank)]
    while True:
        if index.target in (aten.add.Tensor, aten.add.Scalar) and index.args[1] == 0:
            index = index.args[0]  # type: ignore[assignment]
        elif (step := see_through(index)) is not None and step[0].target is not aten.index.Tensor:
            index, into = step
            dims = [None if at is None else dims[at] for at in into]
        else:
            break
    if index.target not in ARANGE or len(dims) != 1:
        return None
    return dims[0] if span(index) == (0, 1) and ir.example(index).shape[0] == size else None


def span(node: fx.Node) -> tuple[Any, Any]:
    """Return the first entry and the step of an `arange`."""
    if node.target is aten.arange.default:
        return 0, 1
    return node.args[0], node.args[2] if len(node.args) > 2 else 1  # type: ignore[return-value]
