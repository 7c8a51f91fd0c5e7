"""Ring communication: every rank of an axis sends to the rank `by` places after it, and receives from that before it.

    y = shift(x, "cp", 1)       in flight
    ...
    y = arrive(y, x)            done; x may be written again

    y = shift_by(x, hops, "cp", 0, 1, False)    as far as row 0 of hops says for step 1 of a ring; 0: nothing is sent

Start and end are two operators, like functional collectives and their waits, so that the nodes between them run during
the transfer. `arrive` also takes the sent tensor: its memory must not be reused before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import has_side_effect

from passes.torch_private import resolve_axis_group

_library = torch.library.Library("ct", "FRAGMENT")
_library.define("shift(Tensor x, str axis, int by) -> Tensor")
_library.define("shift_by(Tensor x, Tensor hops, str axis, int row, int step, bool home) -> Tensor")
_library.define("arrive(Tensor(a) y, Tensor x) -> Tensor(a)")
_in_flight: dict[int, Flight] = {}  # by address of the received tensor


class Flight(NamedTuple):
    """Running transfers, and the sent tensor: Inductor may pass a copy of its own, and free it."""

    works: list[Any]
    sent: Tensor


def forget() -> None:
    """Forget the transfers of a failed step."""
    _in_flight.clear()


@torch.library.impl(_library, "shift", "CompositeExplicitAutograd")
def _shift(x: Tensor, axis: str, by: int) -> Tensor:
    if by == 0 or x.numel() == 0:
        y = x.clone()
        _in_flight[y.data_ptr()] = Flight([], x)
        return y
    group = resolve_axis_group(axis)
    rank, axis_size = group.rank(), group.size()
    y = torch.empty_like(x)
    there, back = (rank + by) % axis_size, (rank - by) % axis_size
    send = dist.P2POp(dist.isend, x, group=group, group_peer=there)
    receive = dist.P2POp(dist.irecv, y, group=group, group_peer=back)
    _in_flight[y.data_ptr()] = Flight(dist.batch_isend_irecv([send, receive]), x)
    return y


def divisors(axis_size: int) -> list[int]:
    """Return the numbers of adjacent ranks that may form one place of a ring; a table of hops has rows for each."""
    return [inner for inner in range(1, axis_size) if axis_size % inner == 0]


def hops_at(hops: Tensor, row: int, step: int, home: bool, axis_size: int) -> int:
    """Return how many ranks further to send the current keys after a step of the ring, from the table `hops`.

    `hops`, i64[rows, steps] on the host, holds the distance from each needed step to the next, from the last one home,
    and 0 at a step that no rank needs. With `home` the last step sends, too.
    """
    by = int(hops[row, step])
    return by % axis_size if home or step + by < axis_size else 0


@torch.library.impl(_library, "shift_by", "CompositeExplicitAutograd")
def _shift_by(x: Tensor, hops: Tensor, axis: str, row: int, step: int, home: bool) -> Tensor:
    return _shift(x, axis, hops_at(hops, row, step, home, resolve_axis_group(axis).size()))


@torch.library.impl(_library, "arrive", "CompositeExplicitAutograd")
def _arrive(y: Tensor, x: Tensor) -> Tensor:
    if y.numel() and y.data_ptr() not in _in_flight:
        raise RuntimeError("ct::arrive: no transfer to this tensor is running; the result of the shift was copied")
    if y.numel():
        for work in _in_flight.pop(y.data_ptr()).works:
            work.wait()
    return y


@torch.library.register_fake("ct::shift")
def _(x: Tensor, axis: str, by: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("ct::shift_by")
def _(x: Tensor, hops: Tensor, axis: str, row: int, step: int, home: bool) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("ct::arrive")
def _(y: Tensor, x: Tensor) -> Tensor:
    return y


shift, shift_by, arrive = torch.ops.ct.shift.default, torch.ops.ct.shift_by.default, torch.ops.ct.arrive.default
SHIFTS = frozenset({shift, shift_by})
has_side_effect(shift)
has_side_effect(shift_by)
has_side_effect(arrive)
