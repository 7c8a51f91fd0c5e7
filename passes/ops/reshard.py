"""The operators at which a tensor changes placement, in pairs that are each other's gradient.

| operator | placement | its gradient |
|---|---|---|
| `all_gather` | Shard -> Replicate | `reduce_scatter` |
| `reduce_scatter` | Partial -> Shard | `all_gather` |
| `psum` | Partial -> Invariant | `invariant_to_replicate` |
| `invariant_to_replicate` | Invariant -> Replicate | `psum` |
| `invariant_to_shard` | Invariant -> Shard | `all_gather_invariant` |
| `all_gather_invariant` | Shard -> Invariant | `invariant_to_shard` |
| `replicate_to_shard` | Replicate -> Shard | `shard_to_partial` |
| `shard_to_partial` | Shard -> Partial | `replicate_to_shard` |
| `replicate_to_invariant` | Replicate -> Invariant | `invariant_to_partial` |
| `invariant_to_partial` | Invariant -> Partial | `replicate_to_invariant` |
| `all_to_all` | Shard -> Shard of another dim | `all_to_all` |
| `pmax` | Partial max -> Invariant | none: for values without gradient |

`axis_size` is the size of the axis, `size` the logical extent of `dim` before or after the split into
`ceil(size / axis_size)`, `axis_index` the rank's coordinate on the axis (a 0-d int64 tensor, so that every rank
runs the same graph), `reduce_dtype` the dtype in which terms are added (None: their own).
Process groups are registered under the axis name. Each operator is one record in `RESHARD_OPS`: the states that it
takes and gives, its gradient, its collective, and its definition in terms of functional collectives, which
`passes.collectives` puts into the graph. All other code looks up facts about these operators in their records.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.torch_private import c10d

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift"]


class Like(NamedTuple):
    """The shape and dtype of an operand, kept for its gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ReshardOp:
    """An operator from one placement to another; `a` are its arguments after the tensor `x`, by name.

    On its axis it takes a tensor in one of the states `takes` and returns one in the state `gives`. `body(x, *a)` is
    its definition, `shape(x, a)` its result's shape, `gradient(g, x, a)` the gradient of `x`, given the shape and dtype
    of `x`. It is a collective of this `kind` (None: ranks send nothing), to which a rank contributes `sends(x, a)`
    bytes, and which completes a sum or maximum if it `reduces`.
    """

    name: str
    body: Callable[..., Tensor]
    takes: tuple[str, ...]
    gives: str
    gradient: Callable[[Tensor, Like, Any], Tensor] | None
    shape: Callable[[Any, Any], Sequence[int]]
    kind: Kind | None = None
    reduces: Literal["sum", "max"] | None = None
    sends: Callable[[Any, Any], int] | None = None

    @cached_property
    def names(self) -> list[str]:
        """The names of the arguments after the tensor."""
        return list(inspect.signature(self.body).parameters)[1:]

    def named(self, arguments: Sequence[Any]) -> SimpleNamespace:
        """Return the arguments after the tensor, by name."""
        return SimpleNamespace(**dict(zip(self.names, arguments, strict=True)))


RESHARD_OPS: dict[Any, ReshardOp] = {}


# ---- definitions -----------------------------------------------------------------------------------


def _all_gather(
    x: Tensor, dim: int, axis: str, axis_size: int, size: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> Tensor:
    local = x.to(dtype).movedim(dim, 0).contiguous()
    full = c10d.wait_tensor(c10d.all_gather_into_tensor(sendable(local), axis_size, axis))
    return received(full, dtype).narrow(0, 0, size).movedim(0, dim)


def sendable(x: Tensor) -> Tensor:
    """Return float8 as bytes and complex numbers as pairs, because backends send only those."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x


def received(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(x)
    return x.view(dtype) if x.dtype != dtype else x


def _terms(x: Tensor, reduce_dtype: torch.dtype | None) -> Tensor:
    """Return the terms of a sum as sent: complex ones as pairs, others in `reduce_dtype`."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.to(reduce_dtype or x.dtype)


def _sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x) if dtype.is_complex else x.to(dtype)


def _reduce_scatter(
    x: Tensor, dim: int, axis: str, axis_size: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None
) -> Tensor:
    full = pad(_terms(x, reduce_dtype), dim, axis_size).movedim(dim, 0).contiguous()
    local = c10d.wait_tensor(c10d.reduce_scatter_tensor(full, "sum", axis_size, axis))
    return _sum(local, dtype).movedim(0, dim)


def _psum(x: Tensor, axis: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    return _sum(c10d.wait_tensor(c10d.all_reduce(_terms(x, reduce_dtype).contiguous(), "sum", axis)), dtype)


def _invariant_to_replicate(x: Tensor, axis: str, reduce_dtype: torch.dtype | None) -> Tensor:
    return x


def _invariant_to_shard(x: Tensor, axis_index: Tensor, dim: int, axis: str, axis_size: int) -> Tensor:
    return pad(x, dim, axis_size).unflatten(dim, (axis_size, -1)).index_select(dim, axis_index.reshape(1)).squeeze(dim)


def _all_gather_invariant(x: Tensor, axis_index: Tensor, dim: int, axis: str, axis_size: int, size: int) -> Tensor:
    return _all_gather(x, dim, axis, axis_size, size, x.dtype, None)


def _replicate_to_shard(x: Tensor, axis_index: Tensor, dim: int, axis: str, axis_size: int) -> Tensor:
    return _invariant_to_shard(x, axis_index, dim, axis, axis_size)


def _shard_to_partial(x: Tensor, axis_index: Tensor, dim: int, axis: str, axis_size: int, size: int) -> Tensor:
    is_own = torch.arange(axis_size, device=x.device) == axis_index
    shape = [1] * (x.dim() + 1)
    shape[dim] = axis_size
    terms = torch.where(is_own.view(shape), x.unsqueeze(dim), torch.zeros((), dtype=x.dtype, device=x.device))
    return terms.flatten(dim, dim + 1).narrow(dim, 0, size)


def _replicate_to_invariant(x: Tensor, axis_index: Tensor, axis: str) -> Tensor:
    return x


def _invariant_to_partial(x: Tensor, axis_index: Tensor, axis: str) -> Tensor:
    return torch.where(axis_index == 0, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, concat_size: int, axis: str, axis_size: int) -> Tensor:
    pieces = pad(x, split_dim, axis_size).unflatten(split_dim, (axis_size, -1)).movedim(split_dim, 0).contiguous()
    sizes = [1] * axis_size
    flat = c10d.wait_tensor(c10d.all_to_all_single(sendable(pieces.flatten(1)), sizes, sizes, axis))
    joined = received(flat, x.dtype).view(pieces.shape).movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)
    return joined.narrow(concat_dim, 0, concat_size)


def _pmax(x: Tensor, axis: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "max", axis))


def pad(x: Tensor, dim: int, axis_size: int) -> Tensor:
    missing = -x.shape[dim] % axis_size
    if not missing:
        return x
    widths = [0, 0] * (x.dim() - 1 - dim) + [0, missing]
    if x.dtype == torch.bool:  # Inductor 2.13 emits invalid C++ for a padded vector of masks
        return F.pad(x.to(torch.int32), widths).to(torch.bool)
    return F.pad(x, widths)


# ---- shapes, written by hand: a deep model has thousands of these operators, and tracing a body is slow --------------


def _same_shape(x: Any, a: Any) -> Sequence[int]:
    return x.shape


def _gathered_shape(x: Any, a: Any) -> Sequence[int]:
    return _with_size(x.shape, a.dim, a.size)


def _shard_shape(x: Any, a: Any) -> Sequence[int]:
    return _with_size(x.shape, a.dim, -(-x.shape[a.dim] // a.axis_size))


def _exchanged_shape(x: Any, a: Any) -> Sequence[int]:
    shard = _with_size(x.shape, a.split_dim, -(-x.shape[a.split_dim] // a.axis_size))
    return _with_size(shard, a.concat_dim, a.concat_size)


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _padded_bytes(x: Any, dim: int, axis_size: int, dtype: torch.dtype | None = None) -> int:
    return math.prod(_with_size(x.shape, dim, -(-x.shape[dim] // axis_size) * axis_size)) * (dtype or x.dtype).itemsize


def _bytes(x: Any, dtype: torch.dtype | None = None) -> int:
    return math.prod(x.shape) * (dtype or x.dtype).itemsize


# ---- the records -----------------------------------------------------------------------------------


def add_reshard(name: str, body: Callable[..., Tensor], takes: tuple[str, ...], gives: str, **facts: Any) -> Any:
    """Register the operator `ct::name` and its record; return the operator.

    It keeps the logical value: changes of it, as for a mean or a quantized sum, belong in operators before or after it.
    `facts` are the other fields of `ReshardOp`. Its kernel must return fresh memory; its definition in a graph need
    not.
    """
    record = ReshardOp(name, body, takes, gives, **facts)

    def kernel(x: Tensor, *arguments: Any) -> Tensor:
        out = body(x, *arguments)
        return out.clone() if out.is_contiguous() else out.contiguous()

    def fake(x: Tensor, *arguments: Any) -> Tensor:
        a = record.named(arguments)
        return x.new_empty(record.shape(x, a), dtype=getattr(a, "dtype", x.dtype))

    def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, *arguments = inputs  # the rank's coordinate, if present, is the first and the only tensor
        ctx.save_for_backward(*(a for a in arguments if isinstance(a, Tensor)))
        ctx.arguments, ctx.like = [a for a in arguments if not isinstance(a, Tensor)], Like(tuple(x.shape), x.dtype)

    def backward(ctx: Any, g: Tensor) -> tuple:
        arguments = [*ctx.saved_tensors, *ctx.arguments]
        return record.gradient(g, ctx.like, record.named(arguments)), *[None] * len(arguments)  # type: ignore[misc]

    schema = torch.library.infer_schema(body, mutates_args=())
    op = torch.library.custom_op(f"ct::{name}", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if record.gradient:
        op.register_autograd(backward, setup_context=keep)
    overload = getattr(torch.ops.ct, name).default
    RESHARD_OPS[overload] = record
    return overload


# fmt: off
all_gather: Any = add_reshard(
    "all_gather", _all_gather, ("shard",), "replicate", shape=_gathered_shape,
    gradient=lambda g, x, a: reduce_scatter(g, a.dim, a.axis, a.axis_size, x.dtype, a.reduce_dtype),
    kind="all_gather", sends=lambda x, a: _bytes(x, a.dtype),
)
reduce_scatter: Any = add_reshard(
    "reduce_scatter", _reduce_scatter, ("partial",), "shard", shape=_shard_shape,
    gradient=lambda g, x, a: all_gather(g, a.dim, a.axis, a.axis_size, x.shape[a.dim], x.dtype, a.reduce_dtype),
    kind="reduce_scatter", reduces="sum", sends=lambda x, a: _padded_bytes(x, a.dim, a.axis_size, a.reduce_dtype),
)
psum: Any = add_reshard(
    "psum", _psum, ("partial",), "invariant", shape=_same_shape,
    gradient=lambda g, x, a: g.to(x.dtype),
    kind="all_reduce", reduces="sum", sends=lambda x, a: _bytes(x, a.reduce_dtype),
)
invariant_to_replicate: Any = add_reshard(
    "invariant_to_replicate", _invariant_to_replicate, ("invariant",), "replicate", shape=_same_shape,
    gradient=lambda g, x, a: psum(g, a.axis, x.dtype, a.reduce_dtype),
)
invariant_to_shard: Any = add_reshard(
    "invariant_to_shard", _invariant_to_shard, ("invariant", "replicate"), "shard", shape=_shard_shape,
    gradient=lambda g, x, a: all_gather_invariant(g, a.axis_index, a.dim, a.axis, a.axis_size, x.shape[a.dim]),
)
all_gather_invariant: Any = add_reshard(
    "all_gather_invariant", _all_gather_invariant, ("shard",), "invariant", shape=_gathered_shape,
    gradient=lambda g, x, a: invariant_to_shard(g, a.axis_index, a.dim, a.axis, a.axis_size),
    kind="all_gather", sends=lambda x, a: _bytes(x),
)
replicate_to_shard: Any = add_reshard(
    "replicate_to_shard", _replicate_to_shard, ("replicate",), "shard", shape=_shard_shape,
    gradient=lambda g, x, a: shard_to_partial(g, a.axis_index, a.dim, a.axis, a.axis_size, x.shape[a.dim]),
)
shard_to_partial: Any = add_reshard(
    "shard_to_partial", _shard_to_partial, ("shard",), "partial", shape=_gathered_shape,
    gradient=lambda g, x, a: replicate_to_shard(g, a.axis_index, a.dim, a.axis, a.axis_size),
)
replicate_to_invariant: Any = add_reshard(
    "replicate_to_invariant", _replicate_to_invariant, ("replicate",), "invariant", shape=_same_shape,
    gradient=lambda g, x, a: invariant_to_partial(g, a.axis_index, a.axis),
)
invariant_to_partial: Any = add_reshard(  # takes replicate copies only in bodies that nothing differentiates
    "invariant_to_partial", _invariant_to_partial, ("invariant", "replicate"), "partial", shape=_same_shape,
    gradient=lambda g, x, a: g,
)
all_to_all: Any = add_reshard(
    "all_to_all", _all_to_all, ("shard",), "shard", shape=_exchanged_shape,
    gradient=lambda g, x, a: all_to_all(g, a.concat_dim, a.split_dim, x.shape[a.split_dim], a.axis, a.axis_size),
    kind="all_to_all", sends=lambda x, a: _padded_bytes(x, a.split_dim, a.axis_size),
)
pmax: Any = add_reshard(
    "pmax", _pmax, ("partial",), "invariant", shape=_same_shape, gradient=None,
    kind="all_reduce", reduces="max", sends=lambda x, a: _bytes(x),
)
# fmt: on


def sums(op: Any) -> bool:
    """Return True if an operator completes a sum over ranks."""
    return op in RESHARD_OPS and RESHARD_OPS[op].reduces == "sum"
