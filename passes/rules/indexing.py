"""Operators that look up or overwrite entries by position: embedding, gather, scatter, slice_scatter."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layout import locate
from passes.ir.operators import argument
from passes.ir.spec import Factor, Spec
from passes.rules.base import (
    Names,
    Rule,
    RuleMaker,
    aligned,
    from_text,
    numbered,
    of_dims,
    result_shapes,
    same_fill,
    tensor_operands,
)
from passes.trace.builder import Builder

aten = torch.ops.aten


def embedding(node: fx.Node) -> Rule:
    """Make the rule of weight[v, d] looked up by ids[...]: if v is sharded, other ranks' rows are 0, a partial sum."""
    rule = from_text("vd, ... -> ...d; sum v; linear 0")(node)
    whole = frozenset(rule.sizes) - {"d"} if argument(node, "scale_grad_by_freq") else frozenset()
    return replace(rule, whole=whole, pad_safe={1: 0.0}, emit=emit_embedding)


def emit_embedding(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Look up the local rows; ids of other ranks' rows give zeros, those of no rank NaN."""
    weight, ids = operands
    factors, options = specs[0].dims[0], node.args[2:]
    if not any(factor.axes for factor in factors):
        return builder.call(node.target, (weight, ids, *options), node.kwargs)
    local, is_local = local_index(builder, ids, factors)
    rows = builder.call(aten.embedding.default, (weight, local))
    if options[:1] and options[0] >= 0:  # padding_idx: this row gets no gradient
        is_trainable = builder.call(aten.unsqueeze.default, (builder.call(aten.ne.Scalar, (ids, options[0])), -1))
        rows = builder.call(aten.where.self, (is_trainable, rows, builder.call(aten.detach.default, (rows,))))
    ids, is_local = (builder.call(aten.unsqueeze.default, (at, -1)) for at in (ids, is_local))
    return builder.trace(partial(own_entries, factors=factors), rows, ids, is_local)


def local_index(builder: Builder, ids: fx.Node, factors: tuple[Factor, ...]) -> tuple[fx.Node, fx.Node]:
    """Return (ids relative to this rank's shard of the factors' dim, clamped into it; a mask of the ids in it)."""
    at = {name: node for factor in factors for name, node in builder.at(factor).items()}

    def find(ids: Tensor, *coordinates: Tensor) -> tuple[Tensor, Tensor]:
        places, stride = dict(zip(at, coordinates)), 1
        local, is_local = torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
        for factor in factors[:0:-1]:  # innermost first
            part, is_here = locate(ids % factor.size, factor, builder.mesh, places)
            local, is_local, ids = local + part * stride, is_local & is_here, ids // factor.size
            stride *= factor.local(builder.mesh)
        part, is_here = locate(ids, factors[0], builder.mesh, places)
        return (local + part * stride, is_local & is_here) if len(factors) > 1 else (part, is_here)

    return builder.trace(find, ids, *at.values())


def own_entries(x: Tensor, ids: Tensor, is_local: Tensor, factors: tuple[Factor, ...]) -> Tensor:
    """Return the looked-up entries of a rank, and zeros for other ranks' ids; NaN where PyTorch would raise IndexError.

    Integers have no NaN: they are zero.
    """
    x = torch.where(is_local, x, torch.zeros((), dtype=x.dtype, device=x.device))
    is_id = (ids >= 0) & (ids < math.prod(factor.size for factor in factors))
    return torch.where(is_id, x, math.nan) if x.dtype.is_floating_point else x


def gather(node: fx.Node) -> Rule:
    """Make the rule of gather, with an index of the same number of dims.

    If the gathered dim is sharded, entries of other ranks are zero: the result is a partial sum.
    """
    x, index = tensor_operands(node)
    dim = node.args[1] % ir.example(x).dim()  # type: ignore[operator]
    shape, out = ir.example(x).shape, ir.example(index).shape
    names = numbered(shape, ones=True)
    cut = {i for i in range(len(shape)) if i != dim and out[i] != shape[i]}
    index_names = tuple((f"o{i}",) if i in cut | {dim} else n for i, n in enumerate(names))
    return of_dims(
        node,
        [names, index_names],
        [index_names],
        reduced={f"d{dim}": "sum"},
        whole=frozenset(f"{k}{i}" for i in cut for k in "do"),
        linear=frozenset([frozenset([0])]),
        pad_safe={1: 0.0},
        emit=emit_gather,
    )


def emit_gather(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Gather local entries; indices of other ranks' entries give zeros of the same dtype, those of no rank NaN."""
    x, index = operands
    dim = node.args[1] % len(specs[0].dims)  # type: ignore[operator]
    factors = specs[0].dims[dim]
    if not any(f.axes for f in factors):
        return builder.call(aten.gather.default, (x, dim, index))
    local, is_local = local_index(builder, index, factors)
    entries = builder.call(aten.gather.default, (x, dim, local))
    return builder.trace(partial(own_entries, factors=factors), entries, index, is_local)


def index_select(node: fx.Node) -> Rule:
    """Make the rule of a 1-D index: the indexed dim cannot be sharded."""
    names = numbered(ir.example(tensor_operands(node)[0]).shape, ones=True)
    dim = node.args[1] % len(names)  # type: ignore[operator]
    return of_dims(
        node,
        [names, [("i",)]],
        [[("i",) if k == dim else n for k, n in enumerate(names)]],
        whole=frozenset([f"d{dim}"]),
        linear=frozenset([frozenset([0])]),
        pad_safe={1: 0.0},
    )


def index(node: fx.Node) -> Rule:
    """Make the rule of x[i, j, :]: the indexed dims of x cannot be sharded; others, and the indices' dims, can."""
    names, index_dims, entries, free = indexed_dims(node)
    return of_dims(
        node,
        [names, *index_dims],
        [entries],
        whole=frozenset(name for (name,) in names) - free,
        linear=frozenset([frozenset([0])]),
        pad_safe={i: 0.0 for i in range(1, 1 + len(index_dims))},
    )


def indexed_dims(node: fx.Node) -> tuple[tuple[Names, ...], list[tuple[Names, ...]], tuple[Names, ...], set[str]]:
    """Return the dims of x, of each index, and of x[i, j, :], and the factors of x's dims that are not indexed."""
    names = numbered(ir.example(node.args[0]).shape, ones=True)
    shapes = {d: ir.example(i).shape for d, i in enumerate(node.args[1]) if i is not None}  # type: ignore[arg-type]
    free = [n for d, n in enumerate(names) if d not in shapes]
    at = min(shapes) if max(shapes) - min(shapes) == len(shapes) - 1 else 0  # of the indices' dims in x[i, j, :]
    broadcast = numbered(torch.broadcast_shapes(*shapes.values()), "i")
    entries = (*free[:at], *broadcast, *free[at:])
    return names, [aligned(shape, broadcast) for shape in shapes.values()], entries, {name for (name,) in free}


def scatter(node: fx.Node) -> Rule:
    """Make the rule of scatter and scatter_add: neither the dim nor any dim that the index shortens can be sharded."""
    x, *others = tensor_operands(node)
    shape, dim = tuple(ir.example(x).shape), node.args[1] % ir.example(x).dim()  # type: ignore[operator]
    full_dims = [d for d, n in enumerate(shape) if d != dim and all(ir.example(o).shape[d] == n for o in others)]
    names = numbered(shape, ones=True)
    dims = [[n if d in full_dims else (f"o{k}.{d}",) for d, n in enumerate(names)] for k in range(len(others))]
    rule = of_dims(node, [names, *dims], [names], pad_safe={1: 0.0})
    return replace(rule, whole=frozenset(rule.sizes) - {f"d{d}" for d in full_dims})


def searchsorted(node: fx.Node) -> Rule:
    """Make the rule of searching values[..., n] in seq[..., k] or a 1-D seq: k cannot be sharded.

    A last operand, if given, sorts seq.
    """
    line, *others = tensor_operands(node)
    is_line = ir.example(line).dim() == 1
    values = others[: int("Scalar" not in node.target._overloadname)]  # type: ignore[union-attr]
    names = numbered(result_shapes(node)[0], ones=True)
    ordered = (("k",),) if is_line else (*names[:-1], ("k",))
    dims = [ordered, *(names for _ in values), *(ordered for _ in others[len(values) :])]
    return of_dims(node, dims, [names], whole=frozenset("k"))


def slice_scatter(node: fx.Node) -> Rule:
    """Make the rule of x with a slice of one dim overwritten: that dim cannot be sharded."""
    names = numbered(result_shapes(node)[0], ones=True)
    dim = argument(node, "dim") % len(names)
    return of_dims(
        node,
        [names, [("s",) if d == dim else n for d, n in enumerate(names)]],
        [names],
        whole=frozenset([f"d{dim}", "s"]),
        linear=frozenset([frozenset([0, 1])]),
        pad_out=same_fill,
    )


def index_put(node: fx.Node) -> Rule:
    """Make the rule of writing or adding to x[i, j, :]: only the dims of x that are not indexed can be sharded."""
    names, index_dims, entries, free = indexed_dims(node)
    rule = of_dims(
        node,
        [names, *index_dims, aligned(ir.example(tensor_operands(node)[-1]).shape, entries)],
        [names],
        linear=frozenset([frozenset([0, len(index_dims) + 1])]),
        pad_out=lambda fills: same_fill([fills[0], fills[-1]]),
    )
    return replace(rule, whole=frozenset(rule.sizes) - free)


RULES: dict[str, RuleMaker] = {
    "bucketize": from_text("..., k -> ...; whole k"),  # k counts the buckets' boundaries
    "embedding": embedding,
    "gather": gather,
    "index": index,
    "index_put": index_put,
    "index_select": index_select,
    "scatter": scatter,
    "scatter_add": scatter,
    "searchsorted": searchsorted,
    "slice_scatter": slice_scatter,
}
