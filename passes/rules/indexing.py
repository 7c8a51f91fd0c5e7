"""Operators that look up or overwrite entries by position: embedding, gather, scatter, slice_scatter."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layout import locate
from passes.ir.operators import argument
from passes.ir.spec import Factor, Spec
from passes.rules.base import Names, Rule, RuleMaker, result_shapes, same_fill, tensor_operands
from passes.trace.builder import Builder

aten = torch.ops.aten


def embedding(node: fx.Node) -> Rule:
    """Make the rule of weight[v, d] looked up by ids[...]: if v is sharded, other ranks' rows are 0, a partial sum."""
    by_frequency = argument(node, "scale_grad_by_freq")
    (_, d), ids = (tuple(ir.example(n).shape) for n in tensor_operands(node))
    dims = tuple((f"i{k}",) if n != 1 else () for k, n in enumerate(ids))
    weight = tensor_operands(node)[0]
    sizes = {f"i{k}": n for k, n in enumerate(ids) if n != 1} | {"v": ir.example(weight).shape[0], "d": d}
    return Rule(
        ((("v",), ("d",)), dims),
        ((*dims, ("d",)),),
        sizes,
        {"v": "sum"},
        whole=frozenset(dims_names(dims) | {"v"} if by_frequency else ()),
        linear=frozenset([frozenset([0])]),
        pad_safe={1: 0.0},
        emit=emit_embedding,
    )


def dims_names(dims: tuple[Names, ...]) -> set[str]:
    return {name for names in dims for name in names}


def emit_embedding(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Look up the local rows; ids of other ranks' rows give zeros."""
    weight, ids = operands
    factors, options = specs[0].dims[0], node.args[2:]
    if not any(factor.axes for factor in factors):
        return builder.call(node.target, (weight, ids, *options), node.kwargs)
    local, is_local = local_index(builder, ids, factors)
    rows = builder.call(aten.embedding.default, (weight, local))
    if options[:1] and options[0] >= 0:  # padding_idx: this row gets no gradient
        is_trainable = builder.call(aten.unsqueeze.default, (builder.call(aten.ne.Scalar, (ids, options[0])), -1))
        rows = builder.call(aten.where.self, (is_trainable, rows, builder.call(aten.detach.default, (rows,))))
    is_local = builder.call(aten.unsqueeze.default, (is_local, -1))
    return builder.call(aten.where.ScalarOther, (is_local, rows, 0.0))


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


def gather(node: fx.Node) -> Rule:
    """Make the rule of gather, with an index of the same number of dims.

    If the gathered dim is sharded, entries of other ranks are zero: the result is a partial sum.
    """
    x, index = tensor_operands(node)
    dim = node.args[1] % ir.example(x).dim()  # type: ignore[operator]
    shape, out = tuple(ir.example(x).shape), tuple(ir.example(index).shape)
    names = tuple((f"d{i}",) for i in range(len(shape)))
    sizes = {f"d{i}": n for i, n in enumerate(shape)}
    cut = {i for i in range(len(shape)) if i != dim and out[i] != shape[i]}
    sizes |= {f"o{i}": out[i] for i in cut | {dim}}
    index_names = tuple((f"o{i}",) if i in cut | {dim} else n for i, n in enumerate(names))
    return Rule(
        (names, index_names),
        (index_names,),
        sizes,
        {f"d{dim}": "sum"},
        whole=frozenset(f"{k}{i}" for i in cut for k in "do"),
        linear=frozenset([frozenset([0])]),
        pad_safe={1: 0.0},
        emit=emit_gather,
    )


def emit_gather(
    builder: Builder, node: fx.Node, operands: list[fx.Node], specs: list[Spec], results: list[Spec]
) -> fx.Node:
    """Gather local entries; indices of other ranks' entries give zeros of the same dtype."""
    x, index = operands
    dim = node.args[1] % len(specs[0].dims)  # type: ignore[operator]
    factors = specs[0].dims[dim]
    if not any(f.axes for f in factors):
        return builder.call(aten.gather.default, (x, dim, index))
    local, is_local = local_index(builder, index, factors)
    entries = builder.call(aten.gather.default, (x, dim, local))
    zero = torch.zeros((), dtype=ir.example(x).dtype).item()
    return builder.call(aten.where.ScalarOther, (is_local, entries, zero))


def index_select(node: fx.Node) -> Rule:
    """Make the rule of a 1-D index: the indexed dim cannot be sharded."""
    x, index = tensor_operands(node)
    shape, (out,) = tuple(ir.example(x).shape), result_shapes(node)
    dim = node.args[1] % len(shape)  # type: ignore[operator]
    names = [(f"d{i}",) for i in range(len(shape))]
    result = [("i",) if k == dim else n for k, n in enumerate(names)]
    sizes = {f"d{i}": n for i, n in enumerate(shape)} | {"i": out[dim]}
    return Rule(
        (tuple(names), (("i",),)),
        (tuple(result),),
        sizes,
        whole=frozenset([f"d{dim}"]),
        linear=frozenset([frozenset([0])]),
        pad_safe={1: 0.0},
    )


def index(node: fx.Node) -> Rule:
    """Make the rule of x[i, j, :]: the indexed dims of x cannot be sharded; others, and the indices' dims, can."""
    x, *indices = tensor_operands(node)
    shape, (out,) = tuple(ir.example(x).shape), result_shapes(node)
    indexed = [d for d, i in enumerate(node.args[1]) if i is not None]  # type: ignore[arg-type]
    free = [d for d in range(len(shape)) if d not in indexed]
    rank = len(out) - len(free)  # dims of the broadcast indices
    first = indexed[0] if indexed[-1] - indexed[0] == len(indexed) - 1 else 0  # position of these dims in the result
    index_dims = tuple(_names("i", out[first : first + rank]))
    names = [(f"d{d}",) for d in range(len(shape))]
    free_names = [names[d] for d in free]
    sizes = {f"d{d}": n for d, n in enumerate(shape)} | {
        f"i{k}": n for k, n in enumerate(out[first : first + rank]) if n != 1
    }
    dims = [_broadcast(tuple(ir.example(i).shape), index_dims) for i in indices]
    return Rule(
        (tuple(names), *dims),
        ((*free_names[:first], *index_dims, *free_names[first:]),),
        sizes,
        whole=frozenset(f"d{d}" for d in indexed),
        linear=frozenset([frozenset([0])]),
        pad_safe={i: 0.0 for i in range(1, 1 + len(indices))},
    )


def _names(tag: str, shape: tuple[int, ...]) -> list[Names]:
    return [(f"{tag}{k}",) if n != 1 else () for k, n in enumerate(shape)]


def _broadcast(shape: tuple[int, ...], full: tuple[Names, ...]) -> tuple[Names, ...]:
    return tuple(names if n != 1 else () for n, names in zip(shape, full[len(full) - len(shape) :], strict=True))


def scatter(node: fx.Node) -> Rule:
    """Make the rule of scatter and scatter_add: neither the dim nor any dim that the index shortens can be sharded."""
    x, *others = tensor_operands(node)
    shape, dim = tuple(ir.example(x).shape), node.args[1] % ir.example(x).dim()  # type: ignore[operator]
    sizes = {f"d{d}": n for d, n in enumerate(shape)}
    full_dims = [d for d, n in enumerate(shape) if d != dim and all(ir.example(o).shape[d] == n for o in others)]
    dims = []
    for k, other in enumerate(others):
        sizes |= {f"o{k}.{d}": n for d, n in enumerate(ir.example(other).shape) if d not in full_dims}
        dims.append(tuple((f"d{d}",) if d in full_dims else (f"o{k}.{d}",) for d in range(len(shape))))
    names = tuple((f"d{d}",) for d in range(len(shape)))
    whole = frozenset(sizes) - {f"d{d}" for d in full_dims}
    return Rule((names, *dims), (names,), sizes, whole=whole, pad_safe={1: 0.0})


def searchsorted(node: fx.Node) -> Rule:
    """Make the rule of searching values[..., n] in seq[..., k] or a 1-D seq: k cannot be sharded.

    A last operand, if given, sorts seq.
    """
    line, *others = tensor_operands(node)
    is_line = ir.example(line).dim() == 1
    values = others[: int("Scalar" not in node.target._overloadname)]  # type: ignore[union-attr]
    shape = result_shapes(node)[0]
    names = tuple((f"d{d}",) for d in range(len(shape)))
    ordered = (("k",),) if is_line else (*names[:-1], ("k",))
    dims = (ordered, *(names for _ in values), *(ordered for _ in others[len(values) :]))
    sizes = {f"d{d}": n for d, n in enumerate(shape)} | {"k": ir.example(line).shape[-1]}
    return Rule(dims, (names,), sizes, whole=frozenset("k"))


def bucketize(node: fx.Node) -> Rule:
    """Make the rule of x and bucket boundaries, which cannot be sharded."""
    x, limits = tensor_operands(node)
    shape = tuple(ir.example(x).shape)
    names = tuple((f"d{d}",) for d in range(len(shape)))
    sizes = {f"d{d}": n for d, n in enumerate(shape)} | {"k": ir.example(limits).shape[0]}
    return Rule((names, (("k",),)), (names,), sizes, whole=frozenset("k"))


def slice_scatter(node: fx.Node) -> Rule:
    """Make the rule of x with a slice of one dim overwritten: that dim cannot be sharded."""
    x, _ = tensor_operands(node)
    shape = tuple(ir.example(x).shape)
    dim = argument(node, "dim") % len(shape)
    names = tuple((f"d{d}",) for d in range(len(shape)))
    part_dims = tuple(("s",) if d == dim else n for d, n in enumerate(names))
    return Rule(
        (names, part_dims),
        (names,),
        {f"d{d}": n for d, n in enumerate(shape)} | {"s": ir.example(tensor_operands(node)[1]).shape[dim]},
        whole=frozenset([f"d{dim}", "s"]),
        linear=frozenset([frozenset([0, 1])]),
        pad_out=same_fill,
    )


def index_put(node: fx.Node) -> Rule:
    """Make the rule of writing or adding to x[i, j, :]: only the dims of x that are not indexed can be sharded."""
    x, *indices, value = tensor_operands(node)
    shape = tuple(ir.example(x).shape)
    indexed = [d for d, i in enumerate(node.args[1]) if i is not None]  # type: ignore[arg-type]
    free = [d for d in range(len(shape)) if d not in indexed]
    index_shape = torch.broadcast_shapes(*(ir.example(i).shape for i in indices))
    first = indexed[0] if indexed[-1] - indexed[0] == len(indexed) - 1 else 0  # position of the indices' dims in value
    index_dims = tuple(_names("i", index_shape))
    names = tuple((f"d{d}",) for d in range(len(shape)))
    free_names = [names[d] for d in free]
    value_dims = (*free_names[:first], *index_dims, *free_names[first:])
    sizes = {f"d{d}": n for d, n in enumerate(shape)} | {f"i{k}": n for k, n in enumerate(index_shape) if n != 1}
    dims = [_broadcast(tuple(ir.example(i).shape), index_dims) for i in indices]
    return Rule(
        (names, *dims, _broadcast(tuple(ir.example(value).shape), value_dims)),
        (names,),
        sizes,
        whole=frozenset(sizes) - {f"d{d}" for d in free},
        linear=frozenset([frozenset([0, len(indices) + 1])]),
        pad_out=lambda fills: same_fill([fills[0], fills[-1]]),
    )


def rules() -> dict[str, RuleMaker]:
    """Return operator name -> rule, for look-ups."""
    return {
        "bucketize": bucketize,
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
