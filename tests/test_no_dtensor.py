"""Compiled steps hold plain tensors only: training works when no DTensor can be created or dispatched."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same, batches, compile_lockstep, llama, llama_loss, train_plainly, train_step
from torch.distributed.tensor import DTensor


@pytest.fixture
def no_dtensor(monkeypatch):
    """Raise for any DTensor that is created or reaches an operator."""

    def refuse(*args, **kwargs):
        raise AssertionError("a DTensor")

    for way_in in ("__new__", "__init__", "__torch_dispatch__", "__torch_function__", "from_local"):
        monkeypatch.setattr(DTensor, way_in, refuse)


def test_the_guard_is_set(no_dtensor):
    with pytest.raises(AssertionError, match="a DTensor"):
        DTensor(torch.ones(2), None, requires_grad=False)


def test_training_makes_no_dtensor(no_dtensor):
    data = batches()
    step = compile_lockstep(llama(), llama_loss, data[0], {"dp_shard": 2})
    ours = train_step(step, data)
    metrics, state = train_plainly(llama(), llama_loss, data)
    assert [m["loss"] for m in ours] == pytest.approx([m["loss"] for m in metrics])
    assert_same(step.state_dict(), state, 1e-10)
    assert {type(local) for s in step.state.values() for local in s.local.values()} == {torch.Tensor}
