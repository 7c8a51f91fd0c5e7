"""Operators on rows that are sorted by the expert they go to: what a mixture of experts is made of.

    order = order(ids, E, k)                k slots a token by expert; ids of E or more go nowhere and come last
    rows = rows(x, order, k)                slot order[i] is a choice of token order[i] // k
    ends = ends(ids, E, k)                  where the rows of each expert end
    h = grouped_mm(rows, w, ends)           rows up to ends[0] by w[0], from there to ends[1] by w[1], ...
    y = unorder(h, order)                   back where the slots were

Within an expert the order of rows means nothing, so a rank that holds some of the tokens may sort its own: `order`,
what is made with it and `ends` are then its own, too. Rows behind the last end are of no expert: they are zero in
results and in gradients.

`grouped_mm` stays one operator; the others are written out when a program is finished (`EXPANSIONS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EXPANSIONS: dict[Any, Callable[..., Tensor]] = {}


# ---- their definitions --------------------------------------------------------------------------------------


def _order(ids: Tensor, groups: int, share: int) -> Tensor:
    return ids.argsort(stable=True)


def _ends(ids: Tensor, groups: int, share: int) -> Tensor:
    return (ids[:, None] <= torch.arange(groups, device=ids.device)).sum(0, dtype=torch.int32)


def _rows(x: Tensor, order: Tensor, share: int) -> Tensor:
    return x[order // share if share > 1 else order]


def _unorder(rows: Tensor, order: Tensor) -> Tensor:
    return rows[torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))]


def _of_group(table: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    group, known = _groups(ends, order.shape[0], table)
    return torch.where(known, table[group], 0.0)


def _group_sums(rows: Tensor, ends: Tensor) -> Tensor:
    group, known = _groups(ends, rows.shape[0], rows)
    return rows.new_zeros([ends.shape[0], *rows.shape[1:]]).index_add(0, group, torch.where(known, rows, 0.0))


def _groups(ends: Tensor, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(the group of each of so many rows, whether it has one, as a mask of what is `like` these rows)."""
    row = torch.arange(size, device=ends.device)
    group = (row[:, None] >= ends).sum(1)
    last = ends.shape[0] - 1
    return group.clamp(max=last), (group <= last).view(-1, *[1] * (like.dim() - 1))


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch.where(_groups(ends, rows.shape[0], rows)[1], F.grouped_mm(rows, weight, offs=ends), 0.0)
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, (start, end) in enumerate(_ranges(ends)):
        torch.mm(rows[start:end], weight[group], out=result[start:end])
    return result


def _grouped_outer(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows.t(), gradient, offs=ends)
    result = rows.new_zeros(ends.shape[0], rows.shape[1], gradient.shape[1])
    for group, (start, end) in enumerate(_ranges(ends)):
        torch.mm(rows[start:end].t(), gradient[start:end], out=result[group])
    return result


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops))


# ---- as operators, with their gradients ---------------------------------------------------------------------

SHAPES: dict[str, Callable[..., Tensor]] = {
    "order": lambda ids, groups, share: torch.empty_like(ids, dtype=torch.int64),
    "ends": lambda ids, groups, share: ids.new_empty(groups, dtype=torch.int32),
    "rows": lambda x, order, share: x.new_empty([order.shape[0], *x.shape[1:]]),
    "unorder": lambda rows, order: torch.empty_like(rows, memory_format=torch.contiguous_format),
    "of_group": lambda table, ends, order: table.new_empty([order.shape[0], *table.shape[1:]]),
    "group_sums": lambda rows, ends: rows.new_empty([ends.shape[0], *rows.shape[1:]]),
    "grouped_mm": lambda rows, weight, ends: rows.new_empty(rows.shape[0], weight.shape[2]),
    "grouped_outer": lambda rows, gradient, ends: rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1]),
}


def _define(body: Callable[..., Tensor], expands: bool = True) -> Any:
    """Register `ct::name`, whose own kernel is its definition."""
    name = body.__name__.removeprefix("_")
    op = torch.library.custom_op(f"ct::{name}", body, mutates_args=())
    op.register_fake(SHAPES[name])
    overload = getattr(torch.ops.ct, name).default
    if expands:
        EXPANSIONS[overload] = body
    return overload


order = _define(_order)
ends = _define(_ends)
rows = _define(_rows)
unorder = _define(_unorder)
of_group = _define(_of_group)
group_sums = _define(_group_sums)
grouped_mm = _define(_grouped_mm, expands=False)
grouped_outer = _define(_grouped_outer, expands=False)


def _gradient(op: Any, backward: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """Register `backward(gradient, needed, *inputs)`, the gradients of as many inputs as it returns."""

    def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]

    def run(ctx: Any, gradient: Tensor) -> tuple:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if x is None else x for x in ctx.rest]
        found = backward(gradient.contiguous(), ctx.needs_input_grad, *inputs)
        return *found, *[None] * (len(inputs) - len(found))

    torch.library.register_autograd(op.name().replace(".default", ""), run, setup_context=setup)


def _rows_backward(gradient: Tensor, needed: Any, x: Tensor, order_: Tensor, share: int) -> tuple[Tensor, ...]:
    by_slot = unorder(gradient, order_)
    return (by_slot.unflatten(0, (-1, share)).sum(1) if share > 1 else by_slot,)


def _grouped_mm_backward(gradient: Tensor, needed: Any, rows_: Tensor, weight: Tensor, ends_: Tensor) -> tuple:
    along_rows = grouped_mm(gradient, weight.transpose(1, 2), ends_) if needed[0] else None
    return along_rows, grouped_outer(rows_, gradient, ends_) if needed[1] else None


_gradient(rows, _rows_backward)
_gradient(unorder, lambda gradient, needed, given, order_: (rows(gradient, order_, 1),))
_gradient(of_group, lambda gradient, needed, table, ends_, order_: (group_sums(gradient, ends_),))
_gradient(grouped_mm, _grouped_mm_backward)

IN_ANY_ORDER = frozenset({order, rows, of_group})  # rows of their results are sorted on each rank by itself
