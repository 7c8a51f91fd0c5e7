"""Copies to the host's memory and back, on a stream of their own.

    h = offload(x)                             under way to pinned memory
    ...
    h = there(h, x)                            x may be freed
    ...
    y = reload(h, device, shape, stride)       under way back
    ...
    y = there(y, h)                            y may be read, h be freed

To start and to end are two operators, as of collectives, so that what stands between them runs beside the copy. What is
allocated is of the computation's stream, which the copy waits for, and which waits for the copy in `there`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import has_side_effect

_library = torch.library.Library("ct", "FRAGMENT")
_library.define("offload(Tensor x) -> Tensor")
_library.define("reload(Tensor h, Device device, int[] shape, int[] stride) -> Tensor")
_library.define("there(Tensor(a) y, Tensor x) -> Tensor(a)")
_under_way: dict[int, tuple[torch.Event, torch.device]] = {}  # address of what is written -> its end, and whose stream


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def _copy(source: Tensor, into: Tensor, device: torch.device) -> Tensor:
    """Begin a copy from or to a device, once what it has been given so far is done."""
    _stream(device).wait_stream(torch.accelerator.current_stream(device))
    with _stream(device):
        into.copy_(source, non_blocking=True)
    _under_way[into.data_ptr()] = _stream(device).record_event(), device
    return into


@torch.library.impl(_library, "offload", "CompositeExplicitAutograd")
def _offload(x: Tensor) -> Tensor:
    return _copy(x, torch.empty(x.shape, dtype=x.dtype, pin_memory=True), x.device)


@torch.library.impl(_library, "reload", "CompositeExplicitAutograd")
def _reload(h: Tensor, device: torch.device, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return _copy(h, torch.empty_strided(shape, stride, dtype=h.dtype, device=device), device)


@torch.library.impl(_library, "there", "CompositeExplicitAutograd")
def _there(y: Tensor, x: Tensor) -> Tensor:
    if not y.numel():  # has no address
        return y
    if y.data_ptr() not in _under_way:
        raise RuntimeError("ct::there: nothing is under way to this tensor; a copy was made of what was started")
    end, device = _under_way.pop(y.data_ptr())
    torch.accelerator.current_stream(device).wait_event(end)
    return y


@torch.library.register_fake("ct::offload")
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


@torch.library.register_fake("ct::reload")
def _(h: Tensor, device: torch.device, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=h.dtype, device=device)


@torch.library.register_fake("ct::there")
def _(y: Tensor, x: Tensor) -> Tensor:
    return y


offload, reload, there = torch.ops.ct.offload.default, torch.ops.ct.reload.default, torch.ops.ct.there.default
COPIES = frozenset({offload, reload, there})
has_side_effect(there)
