"""The operators at which a tensor changes placement, in pairs that are each other's gradient.

| operator | placement | its gradient |
|---|---|---|
| `all_gather` | Shard -> varying copy | `reduce_scatter` |
| `reduce_scatter` | Partial -> Shard | `all_gather` |
| `psum` | Partial -> same copy | `vary` |
| `vary` | same copy -> varying copy | `psum` |
| `slice` | same copy -> Shard | `gather_same` |
| `gather_same` | Shard -> same copy | `slice` |
| `take` | varying copy -> Shard | `place` |
| `place` | Shard -> Partial | `take` |
| `unvary` | varying copy -> same copy | `only_first` |
| `only_first` | same copy -> Partial | `unvary` |
| `all_to_all` | Shard -> Shard of another dim | `all_to_all` |
| `pmax` | Partial max -> same copy | none: for values without gradient |

`parts` is the size of the axis, `size` the logical extent of `dim` before or after the split into
`ceil(size / parts)`, `place` the rank's coordinate on the axis (a 0-d int64 tensor, so that every rank
runs the same graph), `wire` the dtype in which terms are added (None: their own).
Process groups are registered under the axis name. Each operator is defined once, in terms of functional
collectives: `EXPANSIONS` holds the definitions, which `passes.collectives` puts into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.program.torch_private import c10d

EXPANSIONS: dict[Any, Callable[..., Tensor]] = {}


def _all_gather(
    x: Tensor, dim: int, axis: str, parts: int, size: int, dtype: torch.dtype, wire: torch.dtype | None
) -> Tensor:
    local = x.to(dtype).movedim(dim, 0).contiguous()
    full = c10d.wait_tensor(c10d.all_gather_into_tensor(_sendable(local), parts, axis))
    return _received(full, dtype).narrow(0, 0, size).movedim(0, dim)


def _sendable(x: Tensor) -> Tensor:
    """Float8 as bytes, complex numbers as pairs: backends send those."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x


def _received(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(x)
    return x.view(dtype) if x.dtype != dtype else x


def _terms(x: Tensor, wire: torch.dtype | None) -> Tensor:
    """What is sent of the terms of a sum: pairs of complex ones, which have no other dtype."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.to(wire or x.dtype)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x.to(dtype)


def _reduce_scatter(x: Tensor, dim: int, axis: str, parts: int, dtype: torch.dtype, wire: torch.dtype | None) -> Tensor:
    full = _pad(_terms(x, wire), dim, parts).movedim(dim, 0).contiguous()
    local = c10d.wait_tensor(c10d.reduce_scatter_tensor(full, "sum", parts, axis))
    return _sum(local, dtype).movedim(0, dim)


def _psum(x: Tensor, axis: str, dtype: torch.dtype, wire: torch.dtype | None) -> Tensor:
    return _sum(c10d.wait_tensor(c10d.all_reduce(_terms(x, wire).contiguous(), "sum", axis)), dtype)


def _vary(x: Tensor, axis: str, wire: torch.dtype | None) -> Tensor:
    return x


def _slice(x: Tensor, place: Tensor, dim: int, axis: str, parts: int) -> Tensor:
    return _pad(x, dim, parts).unflatten(dim, (parts, -1)).index_select(dim, place.reshape(1)).squeeze(dim)


def _gather_same(x: Tensor, place: Tensor, dim: int, axis: str, parts: int, size: int) -> Tensor:
    return _all_gather(x, dim, axis, parts, size, x.dtype, None)


def _take(x: Tensor, place: Tensor, dim: int, axis: str, parts: int) -> Tensor:
    return _slice(x, place, dim, axis, parts)


def _place(x: Tensor, place: Tensor, dim: int, axis: str, parts: int, size: int) -> Tensor:
    mine = torch.arange(parts, device=x.device) == place
    shape = [1] * (x.dim() + 1)
    shape[dim] = parts
    spread = torch.where(mine.view(shape), x.unsqueeze(dim), torch.zeros((), dtype=x.dtype, device=x.device))
    return spread.flatten(dim, dim + 1).narrow(dim, 0, size)


def _unvary(x: Tensor, place: Tensor, axis: str) -> Tensor:
    return x


def _only_first(x: Tensor, place: Tensor, axis: str) -> Tensor:
    return torch.where(place == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, concat_size: int, axis: str, parts: int) -> Tensor:
    pieces = _pad(x, split_dim, parts).unflatten(split_dim, (parts, -1)).movedim(split_dim, 0).contiguous()
    sizes = [1] * parts
    flat = c10d.wait_tensor(c10d.all_to_all_single(_sendable(pieces.flatten(1)), sizes, sizes, axis))
    joined = _received(flat, x.dtype).view(pieces.shape).movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)
    return joined.narrow(concat_dim, 0, concat_size)


def _pmax(x: Tensor, axis: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "max", axis))


def _pad(x: Tensor, dim: int, parts: int) -> Tensor:
    missing = -x.shape[dim] % parts
    if not missing:
        return x
    widths = [0, 0] * (x.dim() - 1 - dim) + [0, missing]
    if x.dtype == torch.bool:  # Inductor 2.13 emits C++ that does not compile for a padded vector of masks
        return F.pad(x.to(torch.int32), widths).to(torch.bool)
    return F.pad(x, widths)


def _with(x: Tensor, **dims: int) -> list[int]:
    """The shape of `x` with some dims of another size, as `_with(x, d0=3)`."""
    shape = list(x.shape)
    for dim, size in dims.items():
        shape[int(dim[1:])] = size
    return shape


def _cut(x: Tensor, dim: int, parts: int) -> list[int]:
    return _with(x, **{f"d{dim}": -(-x.shape[dim] // parts)})


def _sized(x: Tensor, dim: int, size: int) -> list[int]:
    return _with(x, **{f"d{dim}": size})


# shape of the result, written out: a graph of a deep model has thousands of these, and tracing a body is slow
SHAPES: dict[str, Callable[..., list[int]]] = {
    "all_gather": lambda x, dim, axis, parts, size, dtype, wire: _sized(x, dim, size),
    "reduce_scatter": lambda x, dim, axis, parts, dtype, wire: _cut(x, dim, parts),
    "slice": lambda x, place, dim, axis, parts: _cut(x, dim, parts),
    "gather_same": lambda x, place, dim, axis, parts, size: _sized(x, dim, size),
    "take": lambda x, place, dim, axis, parts: _cut(x, dim, parts),
    "place": lambda x, place, dim, axis, parts, size: _sized(x, dim, size),
    "all_to_all": lambda x, split, concat, size, axis, parts: _with(
        x, **{f"d{split}": -(-x.shape[split] // parts), f"d{concat}": size}
    ),
}


def _define(name: str, body: Callable[..., Tensor]) -> Any:
    """Register `ct::name`; its own kernel must return fresh memory, its expansion in a graph need not."""

    def kernel(x: Tensor, *args: Any) -> Tensor:
        out = body(x, *args)
        return out.clone() if out.is_contiguous() else out.contiguous()

    def fake(x: Tensor, *args: Any) -> Tensor:
        dtype = next((a for a in args if isinstance(a, torch.dtype)), x.dtype)  # of the result; `wire` comes after it
        shape = SHAPES[name](x, *args) if name in SHAPES else list(x.shape)
        return x.new_empty(shape, dtype=x.dtype if name == "vary" else dtype)

    schema = torch.library.infer_schema(body, mutates_args=())
    op = torch.library.custom_op(f"ct::{name}", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    overload = getattr(torch.ops.ct, name).default
    EXPANSIONS[overload] = body
    return overload


all_gather = _define("all_gather", _all_gather)
reduce_scatter = _define("reduce_scatter", _reduce_scatter)
psum = _define("psum", _psum)
vary = _define("vary", _vary)
slice_ = _define("slice", _slice)
gather_same = _define("gather_same", _gather_same)
take = _define("take", _take)
place_ = _define("place", _place)
unvary = _define("unvary", _unvary)
only_first = _define("only_first", _only_first)
all_to_all = _define("all_to_all", _all_to_all)
pmax = _define("pmax", _pmax)

BOUNDARY_OPS = frozenset(EXPANSIONS)


def _gradient(op: Any, backward: Callable[..., Tensor]) -> None:
    """Register `backward(gradient, inputs, x) -> gradient of x`, where x is the first input's shape and dtype."""

    def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, *rest = inputs
        ctx.tensors = [a for a in rest if isinstance(a, Tensor)]
        ctx.save_for_backward(*ctx.tensors)
        ctx.rest = [None if isinstance(a, Tensor) else a for a in rest]
        ctx.like = (tuple(x.shape), x.dtype)

    def run(ctx: Any, gradient: Tensor) -> tuple:
        saved = iter(ctx.saved_tensors)
        rest = [next(saved) if a is None and i == 0 and ctx.tensors else a for i, a in enumerate(ctx.rest)]
        return backward(gradient, ctx.like, *rest), *[None] * len(rest)

    torch.library.register_autograd(op.name().replace(".default", ""), run, setup_context=setup)


_gradient(all_gather, lambda g, x, dim, axis, parts, size, dtype, wire: reduce_scatter(g, dim, axis, parts, x[1], wire))
_gradient(
    reduce_scatter, lambda g, x, dim, axis, parts, dtype, wire: all_gather(g, dim, axis, parts, x[0][dim], x[1], wire)
)
_gradient(psum, lambda g, x, axis, dtype, wire: g.to(x[1]))
_gradient(vary, lambda g, x, axis, wire: psum(g, axis, x[1], wire))
_gradient(slice_, lambda g, x, place, dim, axis, parts: gather_same(g, place, dim, axis, parts, x[0][dim]))
_gradient(gather_same, lambda g, x, place, dim, axis, parts, size: slice_(g, place, dim, axis, parts))
_gradient(take, lambda g, x, place, dim, axis, parts: place_(g, place, dim, axis, parts, x[0][dim]))
_gradient(place_, lambda g, x, place, dim, axis, parts, size: take(g, place, dim, axis, parts))
_gradient(unvary, lambda g, x, place, axis: only_first(g, place, axis))
_gradient(only_first, lambda g, x, place, axis: g)
_gradient(
    all_to_all,
    lambda g, x, split_dim, concat_dim, concat_size, axis, parts: all_to_all(
        g, concat_dim, split_dim, x[0][split_dim], axis, parts
    ),
)
