"""Operators of mixtures of experts, on rows sorted by expert.

A global program, before placement, has these; `way` (`Way`) says how rows reach their experts:

    rows = dispatch(x, ids, k, way)         [(D n), ...]: the sorted rows of each of D owners of E / D experts
    groups = groups(ids, way)               [D, n]: the owner's expert of each row, in any order; E / D for none
    h = expert_mm(rows, w, groups, among)   each row times the matrix of its expert
    h = h + of_expert(b, groups)            a table's entry for each row's expert
    h = each_mm(h, w)                       all rows, [E, n, ...], times the matrix of each expert: a bmm
    y = combine(h, ids, way)                rows in their original slots
    n = sent(ids, way)                      the number of rows for which there is room

The order of rows within an expert is arbitrary, so a rank that holds some of the tokens may sort only its own: `rows`
and `groups` are then in its own order. Rows of no expert are zero in results of matmuls and in gradients.

A rank runs the following. If tokens are gathered, an owner takes its own rows of all tokens:

    ids = spread(ids, E, D)                 [D, n]: for each of D owners, the index of the slot's expert among its own
    order = order(ids, E / D, k)            [D, n]: slots by expert, k slots per token; ids >= E / D, of no expert, last
    rows = rows(x, order, k)                [(D n), ...]: slot order[d, i] is a choice of token order[d, i] // k
    ends = ends(ids, E / D, k)              [D, E / D]: the end of each expert's rows, among those of its owner
    h = grouped_mm(rows, w, ends)           rows up to ends[0, 0] times w[0], from there to ends[0, 1] times w[1], ...
    h = known(h, ends)                      zero for rows of no expert
    y = unorder(h, order)                   [n, ...]: rows in their original slots, summed over owners

If rows are sent instead, S sources (the ranks that hold tokens) send up to C rows to each of D owners:

    slots = sends(ids, way)                 [D, S, C]: the slots sent; n, one past the last slot, for none
    counts = counts(ids, way)               [D, S, E / D]: the number of rows for each expert
    sent = pack(x, slots, ids, k)           [(D S C), ...]
    ids = received(counts, C)               [D, (S C)]: the owner's expert of each row
    rows = arrange(sent, order)             [(D S C), ...]: by expert; `restore` reverses this
    y = unpack(restore(h, order), slots, ids) [n, ...]: rows in their original slots, zero for slots that were not sent

Rows may be sent in parts: part i takes every P-th of the C places, so that it has a share of each expert's rows.

On one device there is one owner. If experts are spread over ranks, each rank is an owner; it multiplies one in `among`
of its rows, which is how FLOPs are counted. `grouped_mm` stays one operator; the others that ranks run are expanded
when a program is finished (`EXPANSIONS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EXPANSIONS: dict[Any, Callable[..., Tensor]] = {}


class Way(NamedTuple):
    """A route of rows to their experts: `groups` experts, `share` choices per token, spread over `owners`.

    With `sources`, each source sends an owner up to `capacity` rows, and drops the others if `drops`; this is part
    `part` of `parts`. Without sources, owners gather all tokens.
    """

    groups: int
    share: int
    owners: int
    sources: int = 0
    capacity: int = 0
    drops: bool = False
    part: int = 0
    parts: int = 1

    @property
    def each(self) -> int:
        """The number of experts of an owner."""
        return -(-self.groups // self.owners)

    @property
    def room(self) -> int:
        """The number of rows that a source may send an owner in this part."""
        return -(-(self.capacity - self.part) // self.parts)


# ---- definitions --------------------------------------------------------------------------------------------


def _spread(ids: Tensor, groups: int, owners: int) -> Tensor:
    each = -(-groups // owners)
    index = ids - each * torch.arange(owners, device=ids.device)[:, None]
    return torch.where((index >= 0) & (index < each) & (ids < groups), index, each)


def _order(ids: Tensor, groups: int, share: int) -> Tensor:
    return ids.argsort(dim=1, stable=True)


def _ends(ids: Tensor, groups: int, share: int) -> Tensor:
    return (ids[:, :, None] <= torch.arange(groups, device=ids.device)).sum(1, dtype=torch.int32)


def _rows(x: Tensor, order: Tensor, share: int) -> Tensor:
    return x[(order // share if share > 1 else order).flatten()]


def _unorder(rows: Tensor, order: Tensor) -> Tensor:
    restored = _restore(rows, order)
    return restored if order.shape[0] == 1 else restored.unflatten(0, order.shape).sum(0)


def _packed(ids: Tensor, way: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (slots [D, S, C] by owner and expert, the ends of each expert's rows [D, S, E / D]) of a part."""
    how, size = Way(*way), ids.shape[0]
    run = -(-size // (how.share * how.sources)) * how.share  # slots of a source: of whole tokens
    ids = F.pad(ids.clamp(max=how.groups), [0, run * how.sources - size], value=how.groups).view(how.sources, run)
    order = ids.argsort(dim=1, stable=True)
    firsts = torch.arange(0, how.owners * how.each + 1, device=ids.device).clamp(max=how.groups)
    before = (ids[:, None, :] < firsts[:, None]).sum(2)  # [S, D each + 1]: rows of earlier experts
    start = before[:, : how.owners * how.each : how.each]  # [S, D]
    ends = before[:, 1:].unflatten(1, (how.owners, how.each)) - start[:, :, None]
    place = torch.arange(how.part, how.capacity, how.parts, device=ids.device)
    slot = order.gather(1, (start[:, :, None] + place).clamp(max=run - 1).flatten(1)).unflatten(1, (how.owners, -1))
    slot = slot + run * torch.arange(how.sources, device=ids.device)[:, None, None]
    slots = torch.where(place < ends[:, :, -1:], slot, size)
    ends = (ends.clamp(max=how.capacity) - how.part + how.parts - 1) // how.parts
    return slots.transpose(0, 1), ends.clamp(min=0).transpose(0, 1)


def _sends(ids: Tensor, way: Sequence[int]) -> Tensor:
    return _packed(ids, way)[0].contiguous()


def _counts(ids: Tensor, way: Sequence[int]) -> Tensor:
    ends = _packed(ids, way)[1]
    return ends.diff(dim=2, prepend=ends.new_zeros(*ends.shape[:2], 1)).to(torch.int32)


def _received(counts: Tensor, capacity: int) -> Tensor:
    place = torch.arange(capacity, device=counts.device)[:, None]
    return (place >= counts.cumsum(2)[:, :, None, :]).sum(3).flatten(1)


def _pack(x: Tensor, slots: Tensor, ids: Tensor, share: int) -> Tensor:
    is_sent = (slots < ids.shape[0]).flatten().view(-1, *[1] * (x.dim() - 1))
    return torch.where(is_sent, x[(slots.flatten() // share).clamp(max=x.shape[0] - 1)], 0.0)


def _unpack(rows: Tensor, slots: Tensor, ids: Tensor) -> Tensor:
    size = ids.shape[0]
    return rows.new_zeros([size + 1, *rows.shape[1:]]).index_copy(0, slots.flatten(), rows)[:size]


def _arrange(x: Tensor, order: Tensor) -> Tensor:
    count, size = order.shape
    return x[(order + size * torch.arange(count, device=order.device)[:, None]).flatten()]


def _restore(rows: Tensor, order: Tensor) -> Tensor:
    count, size = order.shape
    places = torch.arange(count * size, device=order.device).view(count, size)
    return rows[torch.empty_like(order).scatter(1, order, places).flatten()]


def _known(rows: Tensor, ends: Tensor) -> Tensor:
    return torch.where(_groups(ends, rows)[1], rows, 0.0)


def _of_group(table: Tensor, ends: Tensor, order: Tensor) -> Tensor:
    group, known = _groups(ends, table, order.shape[1], table.shape[0])
    return torch.where(known, table[group], 0.0)


def _group_sums(rows: Tensor, ends: Tensor, groups: int) -> Tensor:
    group, known = _groups(ends, rows, groups=groups)
    return rows.new_zeros([groups, *rows.shape[1:]]).index_add(0, group, torch.where(known, rows, 0.0))


def _groups(ends: Tensor, like: Tensor, size: int | None = None, groups: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (the group of each row, a mask of rows with a group, broadcast to `like`); `size` rows per owner."""
    ends = _by_owner(ends)
    owners, each = ends.shape
    row = torch.arange(like.shape[0] // owners if size is None else size, device=ends.device)
    group = (row[:, None] >= ends[:, None, :]).sum(2)
    known = (group < each).view(-1, *[1] * (like.dim() - 1))
    group = group.clamp(max=each - 1) + each * torch.arange(owners, device=ends.device)[:, None]
    last = (owners * each if groups is None else groups) - 1
    return group.flatten().clamp(max=last), known


def _by_owner(ends: Tensor) -> Tensor:
    """Return ends by owner: those of `F.grouped_mm`, int[E], belong to one owner."""
    return ends if ends.dim() == 2 else ends[None]


def has_kernel(rows: Tensor, ends: Tensor) -> bool:
    """Return True if CUDA has a kernel for this grouped matmul; otherwise the host reads the end of each group.

    PyTorch's kernel is CUTLASS's, for Hopper and Blackwell (sm90, sm100); elsewhere `F.grouped_mm` reads the ends, too.
    """
    is_there = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)
    return is_there and rows.dtype == torch.bfloat16 and _by_owner(ends).shape[0] == 1


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, among: float = 1.0) -> Tensor:
    if rows.is_cuda and has_kernel(rows, ends):
        return torch.where(_groups(ends, rows)[1], F.grouped_mm(rows, weight, offs=ends.flatten()), 0.0)
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, (start, end) in _ranges(ends, rows, weight.shape[0]):
        torch.mm(rows[start:end], weight[group], out=result[start:end])
    return result


def _grouped_outer(rows: Tensor, gradient: Tensor, ends: Tensor, groups: int, among: float) -> Tensor:
    if rows.is_cuda and has_kernel(rows, ends):
        return F.grouped_mm(rows.t(), gradient, offs=ends.flatten())
    result = rows.new_zeros(groups, rows.shape[1], gradient.shape[1])
    for group, (start, end) in _ranges(ends, rows, groups):
        torch.mm(rows[start:end].t(), gradient[start:end], out=result[group])
    return result


def _ranges(ends: Tensor, rows: Tensor, groups: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (group, (its first row, one past its last row)); an owner may have fewer groups than others."""
    owners, each = _by_owner(ends).shape
    for owner, stops in enumerate(_by_owner(ends).tolist()):
        first = owner * (rows.shape[0] // owners)
        ranges = zip([0, *stops], stops)
        yield from (
            (owner * each + i, (first + start, first + end))
            for i, (start, end) in enumerate(ranges)
            if owner * each + i < groups
        )


# ---- as operators, with their gradients ---------------------------------------------------------------------


def _slots(ids: Tensor, way: Sequence[int]) -> Tensor:
    """Return a tensor of the shape of slots; raise ValueError if rows must not be dropped but might not fit."""
    how = Way(*way)
    most = -(-ids.shape[0] // (how.share * how.sources)) * min(how.share, how.each)
    if most > how.capacity and not how.drops:
        raise ValueError(f"a source may send an owner {most} rows, there is room for {how.capacity}")
    return ids.new_empty(how.owners, how.sources, how.room)


SHAPES: dict[str, Callable[..., Tensor]] = {
    "spread": lambda ids, groups, owners: ids.new_empty(owners, ids.shape[0]),
    "order": lambda ids, groups, share: torch.empty_like(ids, dtype=torch.int64),
    "ends": lambda ids, groups, share: ids.new_empty(ids.shape[0], groups, dtype=torch.int32),
    "rows": lambda x, order, share: x.new_empty([order.numel(), *x.shape[1:]]),
    "unorder": lambda rows, order: rows.new_empty([order.shape[1], *rows.shape[1:]]),
    "sends": lambda ids, way: _slots(ids, way),
    "counts": lambda ids, way: ids.new_empty(way[2], way[3], Way(*way).each, dtype=torch.int32),
    "received": lambda counts, capacity: counts.new_empty(
        counts.shape[0], counts.shape[1] * capacity, dtype=torch.int64
    ),
    "pack": lambda x, slots, ids, share: x.new_empty([slots.numel(), *x.shape[1:]]),
    "unpack": lambda rows, slots, ids: rows.new_empty([ids.shape[0], *rows.shape[1:]]),
    "arrange": lambda x, order: torch.empty_like(x, memory_format=torch.contiguous_format),
    "restore": lambda rows, order: torch.empty_like(rows, memory_format=torch.contiguous_format),
    "known": lambda rows, ends: torch.empty_like(rows, memory_format=torch.contiguous_format),
    "of_group": lambda table, ends, order: table.new_empty([order.numel(), *table.shape[1:]]),
    "group_sums": lambda rows, ends, groups: rows.new_empty([groups, *rows.shape[1:]]),
    "grouped_mm": lambda rows, weight, ends, among=1.0: rows.new_empty(rows.shape[0], weight.shape[2]),
    "grouped_outer": lambda rows, gradient, ends, groups, among: rows.new_empty(
        groups, rows.shape[1], gradient.shape[1]
    ),
}


def _define(body: Callable[..., Tensor], expands: bool = True) -> Any:
    """Register `ct::name` with its definition as kernel."""
    name = body.__name__.removeprefix("_")
    op = torch.library.custom_op(f"ct::{name}", body, mutates_args=())
    op.register_fake(SHAPES[name])
    overload = getattr(torch.ops.ct, name).default
    if expands:
        EXPANSIONS[overload] = body
    return overload


spread = _define(_spread)
order = _define(_order)
ends = _define(_ends)
rows = _define(_rows)
unorder = _define(_unorder)
sends = _define(_sends)
counts = _define(_counts)
received = _define(_received)
pack = _define(_pack)
unpack = _define(_unpack)
arrange = _define(_arrange)
restore = _define(_restore)
known = _define(_known)
of_group = _define(_of_group)
group_sums = _define(_group_sums)
grouped_mm = _define(_grouped_mm, expands=False)
grouped_outer = _define(_grouped_outer, expands=False)
# The first operand holds rows, the third the ends of their groups.
GROUPED_MATMULS = frozenset({grouped_mm, grouped_outer})


def _gradient(op: Any, backward: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """Register `backward(gradient, needed, *inputs)`, which returns the gradients of the first inputs."""

    def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.constants = [None if isinstance(x, Tensor) else x for x in inputs]

    def run(ctx: Any, gradient: Tensor) -> tuple:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if x is None else x for x in ctx.constants]
        gradients = backward(gradient.contiguous(), ctx.needs_input_grad, *inputs)
        return *gradients, *[None] * (len(inputs) - len(gradients))

    torch.library.register_autograd(op.name().replace(".default", ""), run, setup_context=setup)


def _rows_backward(gradient: Tensor, needed: Any, x: Tensor, order_: Tensor, share: int) -> tuple[Tensor, ...]:
    by_slot = unorder(gradient, order_)
    return (by_slot.unflatten(0, (-1, share)).sum(1) if share > 1 else by_slot,)


def _pack_backward(gradient: Tensor, needed: Any, x: Tensor, slots: Tensor, ids: Tensor, share: int) -> tuple:
    by_slot = unpack(gradient, slots, ids)
    return (by_slot.unflatten(0, (-1, share)).sum(1) if share > 1 else by_slot,)


def _grouped_mm_backward(
    gradient: Tensor, needed: Any, rows_: Tensor, weight: Tensor, ends_: Tensor, among: float = 1.0
) -> tuple[Tensor | None, ...]:
    along_rows = grouped_mm(gradient, weight.transpose(1, 2), ends_, among) if needed[0] else None
    return along_rows, grouped_outer(rows_, gradient, ends_, weight.shape[0], among) if needed[1] else None


_gradient(rows, _rows_backward)
_gradient(unorder, lambda gradient, needed, rows_, order_: (rows(gradient, order_, 1),))
_gradient(pack, _pack_backward)
_gradient(unpack, lambda gradient, needed, rows_, slots, ids: (pack(gradient, slots, ids, 1),))
_gradient(arrange, lambda gradient, needed, x, order_: (restore(gradient, order_),))
_gradient(restore, lambda gradient, needed, rows_, order_: (arrange(gradient, order_),))
_gradient(known, lambda gradient, needed, rows_, ends_: (known(gradient, ends_),))
_gradient(of_group, lambda gradient, needed, table, ends_, order_: (group_sums(gradient, ends_, table.shape[0]),))
_gradient(grouped_mm, _grouped_mm_backward)


# ---- of a global program ------------------------------------------------------------------------------------


def _groups_of_rows(ids: Tensor, way: Sequence[int]) -> Tensor:
    how = Way(*way)
    return received(counts(ids, way), how.room) if how.sources else spread(ids, how.groups, how.owners)


def _order_of(ids: Tensor, way: Sequence[int]) -> Tensor:
    how = Way(*way)
    return order(_groups_of_rows(ids, way), how.each, 1 if how.sources else how.share)


def _dispatch(x: Tensor, ids: Tensor, share: int, way: Sequence[int]) -> Tensor:
    how = Way(*way)
    if not how.sources:
        return rows(x, _order_of(ids, way), share)
    return arrange(pack(x, sends(ids, way), ids, share), _order_of(ids, way))


def _combine(rows_: Tensor, ids: Tensor, way: Sequence[int]) -> Tensor:
    how = Way(*way)
    if how.sources:
        return unpack(restore(rows_, _order_of(ids, way)), sends(ids, way), ids)
    rows_ = known(rows_, _ends_of(_groups_of_rows(ids, way), how.groups)) if how.owners > 1 else rows_
    return unorder(rows_, _order_of(ids, way))


def _sent_rows(ids: Tensor, way: Sequence[int]) -> Tensor:
    return counts(ids, way).sum()


def _ends_of(groups_: Tensor, experts: int) -> Tensor:
    return ends(groups_, -(-experts // groups_.shape[0]), 1)


def _expert_mm(rows_: Tensor, weight: Tensor, groups_: Tensor, among: float) -> Tensor:
    return grouped_mm(rows_, weight, _ends_of(groups_, weight.shape[0]), among)


def _of_expert(table: Tensor, groups_: Tensor) -> Tensor:
    return of_group(table, _ends_of(groups_, table.shape[0]), groups_)


_LIBRARY = torch.library.Library("ct", "FRAGMENT")


def _compose(schema: str, body: Callable[..., Tensor]) -> Any:
    """Register an operator that is a composition of others, which also define its gradient."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, body, "CompositeImplicitAutograd")
    return getattr(torch.ops.ct, name).default


groups = _compose("groups(Tensor ids, int[] way) -> Tensor", _groups_of_rows)
dispatch = _compose("dispatch(Tensor x, Tensor ids, int share, int[] way) -> Tensor", _dispatch)
combine = _compose("combine(Tensor rows, Tensor ids, int[] way) -> Tensor", _combine)
sent = _compose("sent(Tensor ids, int[] way) -> Tensor", _sent_rows)
expert_mm = _compose("expert_mm(Tensor rows, Tensor weight, Tensor groups, float among) -> Tensor", _expert_mm)
each_mm = _compose("each_mm(Tensor rows, Tensor weight) -> Tensor", torch.bmm)
of_expert = _compose("of_expert(Tensor table, Tensor groups) -> Tensor", _of_expert)

IN_ANY_ORDER = frozenset({dispatch, groups, of_expert})  # each rank sorts the rows of their results by itself
