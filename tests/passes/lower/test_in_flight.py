"""Compiled bodies do not overwrite a transfer's operand until it is waited for."""

from __future__ import annotations

import re
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes import torch_private
from passes.ops import host, shift
from passes.ops.shift import SHIFTS
from passes.torch_private import FakeTensorMode, compile_inner, from_torch, inductor_decompositions

SIZE = 64


def transfer_beside_products(p):
    """Send a value while matmuls of its size run; the wait does not read it, as with Inductor's copies."""
    sent = p @ p
    received = torch.ops.ct.shift(sent, "cp", 1)
    product = p + 1
    for _ in range(3):
        product = product @ p
    return torch.ops.ct.arrive(received, p) + product


def gathered_elsewhere(p):
    """Start a collective that another body waits for; its operand is copied, because it has other strides."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ops.aten.permute(p @ p, [1, 0]), 2, "tp")
    product = p + 1
    for _ in range(3):
        product = product @ p
    return gathered, product


def source_of(function, starts):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module = make_fx(function, inductor_decompositions())(torch.empty(SIZE, SIZE))
    values = [from_torch(node).value for node in module.graph.find_nodes(op="placeholder")]
    return compile_inner(fx.GraphModule(module, module.graph), values, mode, {}, starts).source_code


def uses_after(operator, source):
    """Return the uses of an operator's operand after its call: freed, or its memory used again."""
    ((operand, after),) = re.findall(rf"{operator}\.default\((\w+),.*?\n(.*)\n\s*return \(", source, re.DOTALL)
    return re.findall(rf"\b{operand}\b", after)


@pytest.mark.full
@pytest.mark.parametrize(("starts", "is_left_alone"), [(SHIFTS, True), ((), False)])
def test_operands_of_a_transfer_are_neither_freed_nor_written_over(starts, is_left_alone):
    source = source_of(lambda p: (transfer_beside_products(p),), starts)
    assert bool(uses_after(r"ct\.shift", source)) != is_left_alone


@pytest.fixture
def group():
    """Return a process group that sends nothing, by the name of its axis."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch_private.register_axis_group("tp", dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("is_guarded", [True, False])
def test_operands_of_a_collective_that_another_body_waits_for_are_left_alone(is_guarded, group, monkeypatch):
    """Check this, because without the guard Inductor computes into the memory that is being sent."""
    if not is_guarded:
        monkeypatch.setattr(torch_private, "_is_waited_for_elsewhere", lambda node: False)
    uses = uses_after("all_gather_into_tensor", source_of(gathered_elsewhere, ()))
    assert bool(uses) != is_guarded


def test_what_a_rank_sends_in_a_ring_is_kept_until_the_wait(monkeypatch):
    waits = []
    work = SimpleNamespace(wait=lambda: waits.append(1))
    monkeypatch.setattr(shift, "resolve_axis_group", lambda axis: SimpleNamespace(rank=lambda: 0, size=lambda: 2))
    monkeypatch.setattr(shift.dist, "P2POp", lambda *args, **kwargs: None)
    monkeypatch.setattr(shift.dist, "batch_isend_irecv", lambda operations: [work])
    x = torch.ones(4)
    memory = weakref.ref(x)
    y = shift._shift(x, "cp", 1)
    del x
    assert memory() is not None
    shift._arrive(y, y)
    assert memory() is None and waits


class Event:
    """The end of a copy, which has not come yet."""


class Stream:
    def __init__(self, device=None):
        self.waited = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, other):
        self.waited.append(other)

    def wait_event(self, event):
        self.waited.append(event)

    def record_event(self):
        return Event()


@pytest.fixture
def streams(monkeypatch):
    """Return streams by direction, and that of the computation."""
    computing, streams_by_direction = Stream(), {}
    monkeypatch.setattr(host, "_stream", lambda device, out: streams_by_direction.setdefault(out, Stream()))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: computing)
    host.forget()
    return computing, streams_by_direction


def test_the_tensor_that_a_copy_reads_is_kept_until_the_copy_is_waited_for(streams):
    x = torch.ones(4)
    memory = weakref.ref(x)
    h = host._copy(x, torch.empty(4), x.device, out=True)
    del x
    assert memory() is not None
    host._there(h, h)
    assert memory() is None


def test_each_way_has_a_stream_that_waits_for_the_computation(streams):
    computing, by_direction = streams
    host._copy(torch.ones(4), torch.empty(4), torch.device("cpu"), out=True)
    host._copy(torch.ones(4), torch.empty(4), torch.device("cpu"), out=False)
    assert by_direction[True] is not by_direction[False] and all(stream.waited == [computing] for stream in by_direction.values())


def test_a_failed_step_leaves_no_copies(streams):
    h = host._copy(torch.ones(4), torch.empty(4), torch.device("cpu"), out=True)
    host.forget()
    with pytest.raises(RuntimeError, match="no copy to this tensor is running"):
        host._there(h, h)
