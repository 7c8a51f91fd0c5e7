"""Copies to the host's memory and back, each direction on a stream of its own.

    h = offload(x)                             copy to pinned memory starts
    ...
    h = there(h, x)                            done: x may be freed
    ...
    y = reload(h, device, shape, stride)       copy back starts
    ...
    y = there(y, h)                            done: y may be read, h freed

Start and end are two operators, as for collectives, so that the nodes between them run during the copy. Tensors are
allocated on the computation's stream: the copy waits for it, and it waits for the copy in `there`. Until then the
source tensor is kept here: Inductor may pass `offload` a copy of its own, in the layout it wants, and free it at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import has_side_effect

_library = torch.library.Library("ct", "FRAGMENT")
_any_layout = (torch.Tag.flexible_layout,)  # so that Inductor passes the tensor itself, not a copy in other strides
_library.define("offload(Tensor x) -> Tensor", tags=_any_layout)
_library.define("reload(Tensor h, Device device, int[] shape, int[] stride) -> Tensor")
_library.define("there(Tensor(a) y, Tensor x) -> Tensor(a)", tags=_any_layout)
_running: dict[int, Copy] = {}  # by address of the destination


class Copy(NamedTuple):
    """A running copy: the event at its end, the device whose stream waits for it, and the tensor that it reads."""

    end: torch.Event
    device: torch.device
    source: Tensor


def forget() -> None:
    """Forget the copies of a failed step."""
    _running.clear()


@functools.cache
def _stream(device: torch.device, out: bool) -> torch.Stream:
    return torch.Stream(device=device)


def _copy(source: Tensor, into: Tensor, device: torch.device, out: bool) -> Tensor:
    """Start a copy from a device or back, after all work that the device has received so far."""
    stream = _stream(device, out)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        into.copy_(source, non_blocking=True)
    _running[into.data_ptr()] = Copy(stream.record_event(), device, source)
    return into


@torch.library.impl(_library, "offload", "CompositeExplicitAutograd")
def _offload(x: Tensor) -> Tensor:
    return _copy(x, torch.empty(x.shape, dtype=x.dtype, pin_memory=True), x.device, out=True)


@torch.library.impl(_library, "reload", "CompositeExplicitAutograd")
def _reload(h: Tensor, device: torch.device, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return _copy(h, torch.empty_strided(shape, stride, dtype=h.dtype, device=device), device, out=False)


@torch.library.impl(_library, "there", "CompositeExplicitAutograd")
def _there(y: Tensor, x: Tensor) -> Tensor:
    if not y.numel():  # an empty tensor has no address
        return y
    if y.data_ptr() not in _running:
        raise RuntimeError("ct::there: no copy to this tensor is running; the started tensor was itself copied")
    copy = _running.pop(y.data_ptr())
    torch.accelerator.current_stream(copy.device).wait_event(copy.end)
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
STARTS = frozenset({offload, reload})
COPIES = STARTS | {there}
has_side_effect(there)
